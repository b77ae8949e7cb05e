"""Self-speculative methods give ordinary decoding's tokens, and run no layer twice where they need not."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from grids import nightly
from heads_for_tests import make_adapter

from ppd_runtime import OrdinaryDecoding, decode, open_method
from ppd_runtime.cost_model.theory import drafting_ratio
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.registry import METHODS
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.trained.probe import Probe, ProbeInfo, save_probe
from ppd_runtime.tracing.spans import Kind

ModelFolder = Callable[..., Path]
FAMILIES = ["llama", "gemma2", "mistral", "qwen2", "qwen3"]
NUM_LAYERS, EXIT_LAYER = 5, 2
PROMPTS = ([5], [40, 7, 291, 65, 133, 9, 12, 250], list(range(20, 44)))
SAMPLED = (
    {"temperature": 0.6, "top_p": 0.95, "seed": 3},
    {"temperature": 1.0, "top_p": 0.95, "seed": 4},
    {"temperature": 0.9, "seed": 5, "top_k": 1000, "repetition_penalty": 1.1},
)


@dataclass(frozen=True)
class Parts:
    """A model that early layers predict, and untrained parts for it."""

    model: str
    adapter: Path
    probe: Path
    ordinary: OrdinaryDecoding

    def settings(self, method: str) -> dict[str, object]:
        """A method's settings."""
        return {
            "layerskip": {"exit_layer": EXIT_LAYER, "num_speculations": 4},
            "adaspeed": {"exit_layer": EXIT_LAYER, "threshold": 0.1},
            "adaspeed, probe": {"stopping": "probe", "probe": self.probe, "threshold": 0.1},
            "adaspeed, confidence": {"stopping": "confidence", "exit_layer": EXIT_LAYER, "adaptive": False},
            "kangaroo": {"adapter": self.adapter, "threshold": 0.05},
            "kangaroo, probe": {"adapter": self.adapter, "stopping": "probe", "probe": self.probe, "threshold": 0.1},
            "swift": {"threshold": 0.3, "context_window": 6, "search_steps": 40},
            "swift, chains": {"threshold": 0.1, "widest": 1, "search_steps": 0},
        }[method]

    def open(self, method: str, **others: object) -> TextGenerator:
        """The method, ready; it shares ordinary decoding's weights where it may."""
        shared = {} if others.keys() & {"dtype", "trace"} else {"stage": self.ordinary.stage}
        settings = {"dtype": "float32"} | shared | self.settings(method) | others
        return open_method(self.model, method.split(",", maxsplit=1)[0], **settings)


WAYS = (
    "layerskip",
    "adaspeed",
    "adaspeed, probe",
    "adaspeed, confidence",
    "kangaroo",
    "kangaroo, probe",
    "swift",
    "swift, chains",
)
FEW = ("layerskip", "adaspeed, probe", "kangaroo", "swift")
"""Each method once."""


@pytest.fixture(scope="module")
def parts(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Parts]:
    made: dict[tuple[str, str], Parts] = {}

    def of(family: str, dtype: str = "float32") -> Parts:
        if (family, dtype) not in made:
            folder = model_folder(family, num_layers=NUM_LAYERS, quiet_from=EXIT_LAYER, dtype=dtype)
            made[family, dtype] = _parts(folder, tmp_path_factory.mktemp(f"{family}-parts"))
        return made[family, dtype]

    return of


def _parts(model: Path, folder: Path) -> Parts:
    info = describe(str(model))
    adapter = make_adapter(folder / "adapter", model, EXIT_LAYER)
    probe = Probe(adapter.hidden_size)
    with torch.no_grad():
        probe.direction.normal_(generator=torch.Generator().manual_seed(0))
    known = (folder, info.name, model_fingerprint(info), EXIT_LAYER, adapter.hidden_size, info.vocab_size, "")
    save_probe(folder / "probe", probe, ProbeInfo(*known), {})
    ordinary = OrdinaryDecoding(str(model), dtype="float32")
    return Parts(str(model), folder / "adapter", folder / "probe", ordinary)


@pytest.mark.parametrize(
    ("way", "family"),
    [
        pytest.param(way, family, marks=() if family == ("llama", "gemma2")[number % 2] else nightly)
        for number, way in enumerate(WAYS)
        for family in FAMILIES
    ],
)
def test_tokens_are_ordinary_decodings(parts: Callable[..., Parts], way: str, family: str) -> None:
    """In float32, all of them; texts are longer than the windows. Greedy texts are in `test_ends`, too."""
    of_model = parts(family)
    ordinary, method = of_model.ordinary, of_model.open(way)
    accepted = rejected = 0
    for prompt, sampling in [(PROMPTS[2], {}), *zip(PROMPTS, SAMPLED, strict=True)]:
        expected = ordinary.generate(prompt, max_new_tokens=30, ignore_eos=True, **sampling)
        result = method.generate(prompt, max_new_tokens=30, ignore_eos=True, **sampling)
        assert result.token_ids == expected.token_ids
        accepted, rejected = accepted + result.stats.hits, rejected + result.stats.misses
    assert accepted
    assert rejected


@pytest.mark.parametrize("way", FEW)
def test_text_statistics_and_streams(parts: Callable[..., Parts], way: str) -> None:
    method, sampling = parts("llama").open(way), {"max_new_tokens": 25, "ignore_eos": True}
    result = method.generate(PROMPTS[1], **sampling)
    stats, drafts = result.stats, result.stats.speculation
    assert drafts is not None
    assert sum(stats.run_lengths) == stats.new_tokens == len(result.token_ids) == 25
    assert len(drafts.drafted) == len(drafts.accepted) == len(stats.run_lengths) - 1
    assert all(0 <= a <= d for a, d in zip(drafts.accepted, drafts.drafted, strict=True))
    assert stats.run_lengths == (1, *(a + 1 for a in drafts.accepted))
    assert stats.hits == sum(drafts.accepted)
    assert stats.acceptance_rate == sum(drafts.accepted) / sum(drafts.drafted)
    assert stats.mean_accepted_length == 25 / len(stats.run_lengths)
    assert stats.compression_rate == 24 / len(drafts.drafted)
    for window in range(4):
        assert stats.ctar(window) == sum(a + 1 > window for a in drafts.accepted) / len(drafts.accepted)
    steps = sum(drafts.drafted) / len(drafts.drafted)
    cost = 3 / 5 if way.startswith("swift") else EXIT_LAYER / 5
    assert stats.predicted_ratio == pytest.approx(drafting_ratio(stats.compression_rate, steps, cost))
    assert 0 < drafts.draft_s + drafts.verify_s < stats.latency_s
    assert stats.ledger.total_s == pytest.approx(stats.latency_s, rel=0.2)
    stream = method.stream(PROMPTS[1], **sampling)
    events = list(stream)
    assert tuple(event.token_id for event in events) == result.token_ids
    assert "".join(event.text for event in events) == stream.result.text == result.text


@pytest.mark.parametrize("way", ["layerskip", "adaspeed", "kangaroo"])
def test_the_first_layers_run_once_for_a_token(parts: Callable[..., Parts], way: str) -> None:
    """No position passes the first layers twice but where its draft was wrong; the later ones run once a draft."""
    method = parts("llama").open(way, trace=True)
    result = method.generate(PROMPTS[1], max_new_tokens=25, ignore_eos=True)
    assert result.trace is not None
    (process,) = result.trace.processes
    layers = [span for span in process.spans if span.kind == Kind.LAYERS and (span.first, span.last) != (0, 1)]
    shallow = [span.position for span in layers if span.first == 0][1:]
    later = [span for span in layers if span.first == EXIT_LAYER][1:]
    drafts = result.stats.speculation
    assert drafts is not None
    assert len(layers) == 2 + len(shallow) + len(later)
    assert len(later) == len(drafts.drafted)
    assert len(shallow) == sum(drafts.drafted) + len(drafts.drafted)
    repeated = len(shallow) - len(set(shallow))
    assert repeated <= sum(d - a for d, a in zip(drafts.drafted, drafts.accepted, strict=True))


def test_the_adapter_reads_every_exit_state_once(parts: Callable[..., Parts]) -> None:
    """Its passes begin where the last one ended or a draft was dropped, and cover all positions."""
    method = parts("llama").open("kangaroo", trace=True)
    result = method.generate(PROMPTS[1], max_new_tokens=25, ignore_eos=True)
    assert result.trace is not None
    spans = [span for span in result.trace.processes[0].spans if (span.kind, span.first, span.last) == (0, 0, 1)]
    starts = [span.position for span in spans]
    assert starts[0] == 0
    assert starts[1] == len(PROMPTS[1])
    assert all(after <= before + 7 for before, after in itertools.pairwise(starts[1:]))


@pytest.mark.parametrize("way", FEW)
def test_ends(parts: Callable[..., Parts], way: str, model_folder: ModelFolder) -> None:
    """Lengths within drafts, an eos within a draft, stop texts, a prompt at the position limit."""
    of_model = parts("llama")
    ordinary, method = of_model.ordinary, of_model.open(way)
    expected = ordinary.generate(PROMPTS[0], max_new_tokens=11, ignore_eos=True).token_ids
    for length in (*range(1, 6), 11):
        asked = {"max_new_tokens": length, "ignore_eos": True}
        assert method.generate(PROMPTS[0], **asked).token_ids == expected[:length]
    whole = ordinary.generate(PROMPTS[2], max_new_tokens=30, ignore_eos=True)
    for stop in (whole.text[5:8], whole.text[11:13]):
        results = [g.generate(PROMPTS[2], max_new_tokens=30, stop=stop) for g in (ordinary, method)]
        assert results[0].token_ids == results[1].token_ids
        assert (results[0].text, results[0].finish_reason) == (results[1].text, results[1].finish_reason)
    for token in whole.token_ids[4:9:2]:
        ended = method.generate(PROMPTS[2], max_new_tokens=30, eos_token_ids=token)
        assert ended.finish_reason == "eos"
        assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert sum(ended.stats.run_lengths) == len(ended.token_ids)
    prompt, asked = (
        [1 + i % 299 for i in range(method.info.max_positions - 3)],
        {"max_new_tokens": 3, "ignore_eos": True},
    )
    assert method.generate(prompt, **asked).token_ids == ordinary.generate(prompt, **asked).token_ids


@pytest.mark.parametrize("way", FEW)
def test_rejection_sampling_repeats_and_is_greedy_at_zero(parts: Callable[..., Parts], way: str) -> None:
    """The same requests repeat. The same one again does where nothing is kept that the first one steered."""
    of_model = parts("qwen2")
    asked = {"max_new_tokens": 24, "ignore_eos": True}
    expected = of_model.ordinary.generate(PROMPTS[1], **asked).token_ids

    def texts(*seeds: int) -> list[tuple[int, ...]]:
        method = of_model.open(way, acceptance="rejection")
        assert method.generate(PROMPTS[1], **asked).token_ids == expected
        return [method.generate(PROMPTS[1], temperature=1.0, seed=seed, **asked).token_ids for seed in seeds]

    first, again, other = texts(1, 1, 2)
    assert texts(1, 1) == [first, again]
    assert first != other
    assert (first == again) == (way != "swift"), "its search goes on"


@pytest.mark.parametrize("way", FEW)
def test_broken_off_streams_and_calls_at_once(parts: Callable[..., Parts], way: str) -> None:
    """Whatever came before, and with others waiting, a request's tokens are its own."""
    of_model, asked = parts("mistral"), {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.6}
    ordinary, method = of_model.ordinary, of_model.open(way)
    expected = [ordinary.generate(PROMPTS[1], seed=seed, **asked).token_ids for seed in range(2)]
    for taken in (1, 7):
        stream = method.stream(PROMPTS[2], max_new_tokens=30, ignore_eos=True)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert method.generate(PROMPTS[1], seed=0, **asked).token_ids == expected[0]
    with ThreadPoolExecutor(2) as threads:
        results = threads.map(lambda seed: method.generate(PROMPTS[1], seed=seed, **asked).token_ids, range(2))
        assert list(results) == expected


@pytest.mark.parametrize("method", ["layerskip", "adaspeed"])
def test_every_exit_layer_and_draft_length(model_folder: ModelFolder, method: str) -> None:
    folder = str(model_folder("llama", num_layers=NUM_LAYERS, quiet_from=EXIT_LAYER))
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    expected = ordinary.generate(PROMPTS[1], max_new_tokens=20).token_ids
    for exit_layer in range(1, NUM_LAYERS):
        for longest in (1, 30):
            settings = {"exit_layer": exit_layer, "num_speculations": longest, "dtype": "float32"}
            drafting = open_method(folder, method, stage=ordinary.stage, **settings)
            assert drafting.generate(PROMPTS[1], max_new_tokens=20).token_ids == expected


def test_bfloat16_runs(parts: Callable[..., Parts]) -> None:
    """Rounding differs between one row and several, so tokens may; they are valid and as many."""
    method = parts("llama", "bfloat16").open("layerskip", dtype="bfloat16")
    assert method.dtype == "bfloat16"
    assert len(method.generate(PROMPTS[0], max_new_tokens=20, ignore_eos=True).token_ids) == 20


def test_every_method_by_name(parts: Callable[..., Parts]) -> None:
    of_model = parts("llama")
    asked = {"max_new_tokens": 12, "ignore_eos": True}
    expected = decode(of_model.model, PROMPTS[1], "autoregressive", dtype="float32", **asked).token_ids
    for method in METHODS:
        own = {"ppd": {"k": 1, "transport": "local"}, "autoregressive": {}}.get(method)
        own = of_model.settings(method) if own is None else own
        assert decode(of_model.model, PROMPTS[1], method, dtype="float32", **own, **asked).token_ids == expected


def mistakes(of_model: Parts, other: Parts) -> Iterator[tuple[str, dict[str, object], str]]:
    yield "medusa", {}, "method='medusa': choose one of"
    yield "layerskip", {"k": 3}, "layerskip has no setting 'k': it has"
    yield "layerskip", {"exit_layer": 5}, "exit_layer=5: with 5 layers choose 1 to 4"
    yield "layerskip", {"exit_layer": 0}, "exit_layer=0: with 5 layers choose 1 to 4"
    yield "layerskip", {"exit_layer": 1.5}, "exit_layer=1.5: give a whole number"
    yield "layerskip", {"num_speculations": 0}, "num_speculations=0: give a whole number of at least 1"
    yield "layerskip", {"acceptance": "typical"}, "acceptance='typical': choose one of shared-noise, rejection"
    yield "adaspeed", {"stopping": "never"}, "stopping='never': choose one of"
    yield "adaspeed", {"threshold": -1}, "threshold=-1: give a number from 0 to 1"
    yield "adaspeed", {"stopping": "probe"}, "stopping='probe' needs probe=FOLDER for model"
    yield "adaspeed", {"stopping": "probe", "probe": other.probe}, "was trained for layer 2 of model"
    yield "adaspeed", {"stopping": "probe", "probe": of_model.probe, "exit_layer": 3}, "not for layer 3"
    yield "adaspeed", {"probe": of_model.probe}, "has no use with stopping='product': choose probe"
    yield "kangaroo", {}, "kangaroo needs adapter=FOLDER for model"
    yield "kangaroo", {"adapter": other.adapter}, "was trained for layer 2 of model"
    yield "kangaroo", {"adapter": of_model.adapter, "exit_layer": 1}, "not for layer 1"
    yield "kangaroo", {"adapter": of_model.probe}, "holds no adapter.json"


def test_mistakes_are_one_line(parts: Callable[..., Parts]) -> None:
    of_model, other = parts("llama"), parts("qwen2")
    for method, settings, message in mistakes(of_model, other):
        with pytest.raises(ValueError) as caught:
            open_method(of_model.model, method, **settings)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
