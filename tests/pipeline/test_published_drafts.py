"""Published heads guess beside stages: they hear the model's own states, and tokens stay ordinary decoding's."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench
from published_heads import IDS, card_of, tensors_of, write_head
from staged_runs import StagedRun
from test_single_stage import SingleRun
from torch import Tensor

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.models.trained.published import describe_published, load_published
from ppd_runtime.models.trained.published_network import PublishedDrafter
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.sampling.sampler import Sampler

ModelFolder = Callable[..., Path]
Heard = list[tuple[list[int], Tensor]]
LAYERS = (1, 3, 6)
KINDS = pytest.mark.parametrize("kind", ["eagle3", "dflash"])
TEXT = "the quick brown fox jumps over the lazy dog"
LONG = " ".join(f"word{number}" for number in range(60))
"""A prompt of more than one chunk."""
SAMPLING = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> Path:
    """A small Llama, with as many layers as the heads read of."""
    return model_folder("llama", num_layers=8)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heard]]:
    """What each drafter heard of each text: pieces of tokens, and states of the token before each. All are asked."""
    texts: list[Heard] = []
    begin, follow = PublishedDrafter.begin, PublishedDrafter.follow

    def begins(drafter: Any, capacity: int) -> None:
        begin(drafter, capacity)
        drafter.heard = []
        texts.append(drafter.heard)

    def follows(drafter: Any, tokens: Any, states: Tensor) -> None:
        follow(drafter, tokens, states)
        drafter.heard.append((list(tokens), states.clone()))

    monkeypatch.setattr(PublishedDrafter, "begin", begins)
    monkeypatch.setattr(PublishedDrafter, "follow", follows)
    monkeypatch.setattr(NetworkDrafts, "is_worth", lambda self, chance: True)
    return texts


def head(folder: Path, kind: str, model: Path, **fields: Any) -> Path:
    card = card_of(kind, model, **fields)
    return write_head(folder / kind, card, tensors_of(card))


def states_of(bench: Bench, text: list[int], prompt_size: int, layers: tuple[int, ...]) -> Tensor:
    """Ordinary decoding's states of a text after some layers, `[tokens, layers, hidden_size]`."""
    stage, found = bench.stage(), []
    stage.begin(len(text))
    for tokens in (text[:prompt_size], *([token] for token in text[prompt_size:])):
        states: Any = tokens
        position, of_layers = stage.length(0), []
        for first, last in zip((0, *layers), (*layers, 8), strict=True):
            states = stage.run(first, last, states, position)
            of_layers.append(states[0])
        found.append(torch.stack(of_layers[: len(layers)], dim=1))
    return torch.cat(found)


def check_heard(texts: list[Heard], text: list[int], states: Tensor, from_the_first: bool = True) -> int:
    """Drafters heard the text without a gap, each token with the states before it; returns how many heard of it."""
    number = 0
    for pieces in filter(None, texts):
        tokens = [token for piece, _ in pieces for token in piece]
        told = torch.cat([states for _, states in pieces])
        places = [place for place in range(len(states)) if torch.equal(states[place], told[0])]
        if not places:
            continue
        number += 1
        assert places[0] == 0 or not from_the_first
        assert tokens == text[places[0] + 1 :][: len(tokens)]
        assert torch.equal(told, states[places[0] :][: len(told)])
    return number


@KINDS
@pytest.mark.parametrize(
    "settings", [{"stages": 1}, {"stages": 2}, {"cuts": (1, 5)}, {"cuts": (3, 6), "rows": 3}], ids=str
)
def test_tokens_and_states_are_ordinary_decodings(
    model: Path, tmp_path: Path, heard: list[Heard], kind: str, settings: dict[str, Any]
) -> None:
    ordinary, bench = OrdinaryDecoding(model, dtype="float32"), Bench.of(model)
    folder = head(tmp_path, kind, model)
    with PPDRuntime(
        model, drafter=folder, speculation="always", transport="local", dtype="float32", **settings
    ) as runtime:
        assert {spec.drafter.layers for spec in runtime._specs} == {LAYERS}
        for prompt, sampling in ((TEXT, {}), (TEXT, SAMPLING), (LONG, {}), (LONG, SAMPLING)):
            heard.clear()
            asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
            result, expected = runtime.generate(prompt, **asked), ordinary.generate(prompt, **asked)
            assert result.token_ids == expected.token_ids
            ids = ordinary.encoded([prompt])[0]
            text = [*ids, *result.token_ids]
            assert check_heard(heard, text, states_of(bench, text, len(ids), LAYERS)) == 1
            (pieces,) = filter(None, heard)
            assert len(pieces[0][0]) >= len(ids) - 1, "the prompt too, and whole where an earlier one began alike"


@KINDS
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    "place",
    [{"weights": "int8"}, {"compile": True}, {"weights": "int8", "compile": True}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_other_formats_and_requests_at_once(
    model: Path, tmp_path: Path, heard: list[Heard], kind: str, stages: int, place: dict[str, Any]
) -> None:
    place = {"dtype": "float32", **place}
    ordinary = OrdinaryDecoding(model, **place)
    prompts = (TEXT, "a", LONG, "I am")
    with PPDRuntime(
        model, stages=stages, drafter=head(tmp_path, kind, model), speculation="always", transport="local", **place
    ) as runtime:
        for sampling in ({}, SAMPLING):
            asked = {"max_new_tokens": 16, "ignore_eos": True, **sampling}
            with ThreadPoolExecutor(4) as pool:
                results = list(pool.map(partial(runtime.generate, **asked), prompts))
            assert [result.token_ids for result in results] == [
                ordinary.generate(prompt, **asked).token_ids for prompt in prompts
            ]
        stream = runtime.stream(TEXT, max_new_tokens=64, ignore_eos=True)
        for _ in stream:
            runtime.cancel()
        assert stream.result.finish_reason == "cancelled"
        again = runtime.generate(TEXT, max_new_tokens=16, ignore_eos=True).token_ids
        assert again == ordinary.generate(TEXT, max_new_tokens=16, ignore_eos=True).token_ids
    assert any(heard)


@KINDS
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stages_that_are_lost(model: Path, tmp_path: Path, heard: list[Heard], kind: str, params: Any) -> None:
    bench = Bench.of(model)
    ids = bench.prompt_ids(PROMPTS[4])
    expected = bench.ordinary(ids, params).tokens
    text = [*ids, *expected]
    states = states_of(bench, text, len(ids), LAYERS)
    drafter = load_published(describe_published(head(tmp_path, kind, model), bench.info), bench.stage().model)
    for rank in (None, 0, 1, 2):
        for seed in range(2):
            run = StagedRun(bench, ids, params, (3, 5), 2, 3, seed, network=drafter, told_layers=LAYERS)
            if rank is not None:
                run.network.plan[40 + 30 * seed] = lambda run=run, rank=rank: run.lose(rank)
            heard.clear()
            assert run.run() == expected
            assert check_heard(heard, text, states, from_the_first=rank is None)


@KINDS
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("resumes", [0, 5])
def test_one_stage_hears_also_what_the_client_has(
    model: Path, tmp_path: Path, heard: list[Heard], kind: str, params: Any, resumes: int
) -> None:
    bench = Bench.of(model)
    ids = bench.prompt_ids(PROMPTS[4])
    expected = bench.ordinary(ids, params).tokens
    text = [*ids, *expected]
    drafter = load_published(describe_published(head(tmp_path, kind, model), bench.info), bench.stage().model)
    run = SingleRun(bench, ids, params, chains=False, told=LAYERS, delivered=expected[:resumes])
    ranking = ShortlistSampler(Sampler(params, len(ids)), drafter.tokens, bench.info.vocab_size)
    drafts = NetworkDrafts(drafter, ranking, 3, 0, lambda: 0.0, reads_prompt=True)
    run.machine._network = run.machine._chooser._network = drafts
    run.machine._chooser._drafters = []
    assert run.to_the_end() == expected[resumes:]
    assert check_heard(heard, text, states_of(bench, text, len(ids), LAYERS)) == 1


@KINDS
def test_a_head_that_takes_the_models_head(model: Path, tmp_path: Path, heard: list[Heard], kind: str) -> None:
    folder = head(tmp_path, kind, model, draft_vocab_size=300)
    takes = kind == "dflash"
    ordinary = OrdinaryDecoding(model, dtype="float32")
    settings = {"stages": 2, "drafter": folder, "transport": "local", "dtype": "float32", "speculation": "always"}
    with PPDRuntime(model, **settings) as runtime:
        assert [spec.drafter.takes_head for spec in runtime._specs] == [takes] * 2
        expected = ordinary.generate(TEXT, max_new_tokens=16).token_ids
        assert runtime.generate(TEXT, max_new_tokens=16).token_ids == expected
    if takes:
        with pytest.raises(ValueError, match="others than stages guess among; drop guess_vocab$"):
            PPDRuntime(model, guess_vocab=50, **settings)
        return
    with PPDRuntime(model, guess_vocab=50, **settings) as runtime:
        assert runtime.generate(TEXT, max_new_tokens=16).token_ids == expected
    assert any(heard)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": {"vocab_size": 301}}, "is for a vocabulary of 301 tokens, the model's has 300"),
        ({"layers": {"hidden_size": 64}}, "has hidden_size=64, the model 32"),
        ({"what_is_this": 1}, "config.json has what_is_this=1, which is not understood"),
        ({IDS["eagle3"]: [1, 3, 9]}, "no rising numbers of the model's 8 layers"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    model: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^drafter='.*{message}") as told:
        PPDRuntime(model, stages=1, drafter=head(tmp_path, "eagle3", model, **fields))
    assert "\n" not in str(told.value)
