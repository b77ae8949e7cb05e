"""Match rates against the pipeline's own exit head, token by token; ranges and first boundaries."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from grids import nightly
from heads_for_tests import make_head
from models_for_tests import VOCAB_SIZE, load_stage

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.cost_model.match_rates import read_match_rates
from ppd_runtime.models.checkpoint.description import describe, load_tokenizer
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.trained.exit_heads import ModelHead, TrainedHead
from ppd_runtime.models.trained.heads import KINDS, load_head
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.config import FORMATS
from ppd_runtime.tune import match_rates
from ppd_runtime.tune.match_rate_report import MatchRateReport, measured_report, position_ranges, summarise
from ppd_runtime.tune.match_rates import LOGITS, SHARED_NOISE, MatchRateMeter, MatchRateSetting, trained_head_meter
from ppd_runtime.tune.prompt_files import read_prompts

ModelFolder = Callable[..., Path]
NUM_LAYERS, KS, NEW_TOKENS = 4, (1, 3, 5), 10
PROMPTS = ("The quick brown fox", "A model writes", "Whoever may compute the next token")
GREEDY = SamplingParams(NEW_TOKENS)
SAMPLED = (
    SamplingParams(NEW_TOKENS, temperature=1.0, seed=3),
    SamplingParams(NEW_TOKENS, temperature=3.0, top_p=0.8, seed=3),
    SamplingParams(NEW_TOKENS, temperature=0.7, top_k=4, seed=2**64 - 2),
)


def setting_of(sampling: SamplingParams = GREEDY, **changes: object) -> MatchRateSetting:
    known = {"num_layers": NUM_LAYERS, "vocab_size": VOCAB_SIZE, "exit_layers": (1, 2, 3), "ks": KS}
    return MatchRateSetting(**(known | {"sampling": sampling} | changes))


def report_on(
    folder: Path,
    sampling: SamplingParams = GREEDY,
    prompts: Sequence[str] = PROMPTS,
    weights: str | None = None,
    **changes: object,
) -> MatchRateReport:
    ordinary = OrdinaryDecoding(str(folder), weights=weights)
    return measured_report(MatchRateMeter(ordinary, setting_of(sampling, **changes)), prompts)


def generated(folder: Path, sampling: SamplingParams) -> Iterator[tuple[list[int], tuple[int, ...], SamplingParams]]:
    """Each prompt's ids, the tokens that full depth gives, and the settings with the prompt's own seed."""
    ordinary = OrdinaryDecoding(str(folder))
    for number, prompt in enumerate(PROMPTS):
        own = replace(sampling, seed=(sampling.seed + number) % 2**64)
        values = {name: value for name, value in asdict(own).items() if name != "stop"}
        result = ordinary.generate(prompt, **values)
        yield list(result.prompt_ids), result.token_ids, own


def named_token_by_token(
    folder: Path, sampling: SamplingParams, logits_only: bool = False
) -> Iterator[dict[tuple[int, int], bool]]:
    """For each token, each exit layer and each k whether the pipeline's exit head names it among k."""
    stage = load_stage(folder)
    for prompt_ids, tokens, own in generated(folder, sampling):
        head = ModelHead(stage, Sampler(replace(own, temperature=0.0) if logits_only else own, len(prompt_ids)))
        stage.begin(len(prompt_ids) + len(tokens))
        history, inputs = list(prompt_ids), list(prompt_ids)
        for token in tokens:
            hidden, named, position = inputs, {}, stage.length(0)
            for layer in range(1, NUM_LAYERS):
                hidden = stage.run(layer - 1, layer, hidden, position)
                named |= {(layer, k): token in head.candidates(hidden, history, k) for k in KS}
            yield named
            history, inputs = [*history, token], [token]


@pytest.mark.parametrize(
    "family",
    ["llama", pytest.param("gemma2", marks=nightly)],  # plain; windows, soft-capped logits
)
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3, suppress_tokens=(5, 6)),
        *(pytest.param(params, marks=nightly if params is not SAMPLED[1] else ()) for params in SAMPLED),
        replace(SAMPLED[1], no_repeat_ngram_size=2),
    ],
    ids=["greedy", "greedy with penalties", "all", "top-p", "top-k", "top-p with penalties"],
)
def test_rates_are_those_of_the_pipelines_exit_head(
    model_folder: ModelFolder, family: str, sampling: SamplingParams
) -> None:
    folder = model_folder(family)
    report = report_on(folder, sampling)
    assert set(report.overall) == ({LOGITS} if sampling.greedy else {SHARED_NOISE, LOGITS})
    for ranking, rates in report.overall.items():
        named = list(named_token_by_token(folder, sampling, logits_only=ranking == LOGITS))
        assert rates.comparisons == len(named) == len(PROMPTS) * NEW_TOKENS
        for layer, k in itertools.product((1, 2, 3), KS):
            assert rates.rate(layer, k) == sum(one[layer, k] for one in named) / len(named)
    assert 0 < report.runtime_rates.rate(3, 5) < 1  # the comparison says something


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLED[:2]], ids=["greedy", "all", "top-p"])
def test_rates_of_a_trained_head_are_the_pipelines(
    model_folder: ModelFolder, tmp_path: Path, kind: str, sampling: SamplingParams
) -> None:
    folder, prompt_ids = model_folder("gemma2"), [40, 7, 291]
    head, stage = make_head(tmp_path / "head", folder, kind, 2), load_stage(folder)
    ordinary = OrdinaryDecoding(str(folder))
    text = trained_head_meter(ordinary, setting_of(sampling, exit_layers=(2,)), head).measure(prompt_ids, seed=5)
    own = replace(sampling, seed=5)
    tokens = ordinary.generate(prompt_ids, **{name: value for name, value in asdict(own).items() if name != "stop"})
    trained = TrainedHead(load_head(head, stage.model), Sampler(own))
    stage.begin(len(prompt_ids) + NEW_TOKENS)
    history, inputs, places = list(prompt_ids), list(prompt_ids), []
    for token in tokens.token_ids:
        named = trained.candidates(stage.run(0, 2, inputs, stage.length(0)), history, max(KS))
        places.append(named.index(token) if token in named else max(KS))
        history, inputs = [*history, token], [token]
    assert text[LOGITS if sampling.greedy else SHARED_NOISE] == [places]
    with pytest.raises(ValueError, match="was trained for layer 2 .*not for layers 1, 3"):
        trained_head_meter(ordinary, setting_of(sampling), head)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED[1]], ids=["greedy", "top-p"])
def test_first_boundaries_are_those_of_the_pipelines_exit_heads(
    model_folder: ModelFolder, sampling: SamplingParams
) -> None:
    """Token by token: the first of several boundaries whose candidates hold it."""
    folder, cuts = model_folder("llama"), ((2,), (1, 3), (1, 2, 3))
    report, tokens = report_on(folder, sampling, cuts=cuts), list(named_token_by_token(folder, sampling))
    for row, (places, k) in itertools.product(report.first_boundaries[report.setting.rankings[0]], enumerate(KS)):
        expected = [0] * (len(row.cuts) + 1)
        for named in tokens:
            expected[next((at for at, cut in enumerate(row.cuts) if named[cut, k]), len(row.cuts))] += 1
        assert row.counts[places].tolist() == expected
        assert row.shares(k) == tuple(count / (len(PROMPTS) * NEW_TOKENS) for count in expected)
    assert [row.cuts for row in report.first_boundaries[LOGITS]] == list(cuts)


def test_first_boundaries_of_given_places() -> None:
    text = {LOGITS: [[0, 1, 5, 5], [5, 0, 2, 5], [0, 0, 0, 5]]}
    report = summarise("m", "float32", setting_of(SamplingParams(16), cuts=((1, 2, 3), (3,))), [text, text])
    (one, all_three) = report.first_boundaries[LOGITS]
    assert (one.cuts, all_three.cuts) == ((3,), (1, 2, 3))
    assert [one.shares(k) for k in KS] == [(0.75, 0.25)] * 3
    assert all_three.shares(1) == (0.25, 0.25, 0.25, 0.25)
    assert all_three.shares(3) == (0.5, 0.25, 0, 0.25)
    held = report.as_dict()
    assert held["first_boundary"] == held["rankings"][LOGITS]["first_boundary"] == [one.as_dict(), all_three.as_dict()]
    assert one.as_dict() == {"cuts": [3], "shares": {str(k): [0.75, 0.25] for k in KS}}
    without = summarise("m", "float32", setting_of(SamplingParams(16)), [text, text]).as_dict()
    assert "first_boundary" not in without
    del held["first_boundary"], held["rankings"][LOGITS]["first_boundary"]
    assert held == without


def test_the_exits_at_cuts_are_measured_too() -> None:
    assert setting_of(exit_layers=(2,), cuts=((3,), (1, 3), (3,))).exit_layers == (1, 2, 3)
    assert setting_of(cuts=((1, 3), (3,), (1, 3))).cuts == ((3,), (1, 3))


@pytest.mark.parametrize("weights", FORMATS)
def test_rates_of_weights_of_few_bits_are_those_of_their_folder(
    model_folder: ModelFolder, tmp_path: Path, weights: str
) -> None:
    folder = model_folder("llama")
    quantise_model(str(folder), tmp_path / "out", weights)
    given, theirs = report_on(folder, weights=weights), report_on(tmp_path / "out")
    assert given.as_dict()["weights"] == theirs.as_dict()["weights"] == weights
    assert (given.overall[LOGITS].hits == theirs.overall[LOGITS].hits).all()


def test_measuring_more_than_a_block_of_positions(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = report_on(model_folder("llama"), SAMPLED[0])
    monkeypatch.setattr(match_rates, "_ROWS", 3)
    in_blocks = report_on(model_folder("llama"), SAMPLED[0])
    assert whole.as_dict() == in_blocks.as_dict()


def test_a_subset_of_layers_and_ks_gives_the_same_rates(model_folder: ModelFolder) -> None:
    whole = report_on(model_folder("llama"))
    part = report_on(model_folder("llama"), exit_layers=(3, 2), ks=(3,)).runtime_rates
    assert part.exit_layers == (2, 3)
    assert [part.rate(layer, 3) for layer in (2, 3)] == [whole.runtime_rates.rate(layer, 3) for layer in (2, 3)]


def test_other_exit_heads_plug_in(model_folder: ModelFolder) -> None:
    """A head that always names tokens 7 and 8 first after layer 1, and 8 and 7 behind the others."""
    asked = []

    def exit_logits(hidden: torch.Tensor, exit_layer: int) -> torch.Tensor:
        asked.append((tuple(hidden.shape), exit_layer))
        logits = torch.zeros(len(hidden), VOCAB_SIZE)
        logits[:, 7], logits[:, 8] = (2, 1) if exit_layer == 1 else (1, 2)
        return logits

    ordinary = OrdinaryDecoding(str(model_folder("llama")))
    meter = MatchRateMeter(ordinary, setting_of(ks=(1, 2)), exit_logits)
    text = meter.measure([40, 7, 291], seed=0)
    tokens = ordinary.generate([40, 7, 291], max_new_tokens=NEW_TOKENS).token_ids
    assert asked == [((NEW_TOKENS, 32), layer) for layer in (1, 2, 3)]
    assert text[LOGITS][0] == [{7: 0, 8: 1}.get(token, 2) for token in tokens]
    assert text[LOGITS][2] == [{8: 0, 7: 1}.get(token, 2) for token in tokens]


def test_places_follow_the_pipelines_order_among_equals() -> None:
    scores = torch.tensor([0.0, 2, 2, 1, 2, 1]).repeat(6, 1)
    places = match_rates.places_among_best(scores, torch.arange(6), 3)
    head = Sampler(GREEDY).rank(scores[0], [], 3)
    assert places.tolist() == [head.index(token) if token in head else 3 for token in range(6)]


def test_a_text_that_ends_early_counts_as_far_as_it_goes(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    stop = OrdinaryDecoding(str(folder)).generate(PROMPTS[0], max_new_tokens=NEW_TOKENS).token_ids[4]
    ending = model_folder("llama", eos_token_id=stop)
    report = report_on(ending, prompts=PROMPTS[:1])
    tokens = OrdinaryDecoding(str(ending)).generate(PROMPTS[0], max_new_tokens=NEW_TOKENS).token_ids
    assert report.runtime_rates.comparisons == len(tokens) <= 5
    assert list(report.by_position[LOGITS])[-1][1] <= 6


def test_ranges_sum_up_to_the_whole(model_folder: ModelFolder) -> None:
    report = report_on(model_folder("llama"), SAMPLED[0])
    assert report.as_dict()["weights"] == "floats"
    for ranking, ranges in report.by_position.items():
        whole = report.overall[ranking]
        assert sum(rates.comparisons for rates in ranges.values()) == whole.comparisons
        assert (sum(rates.hits for rates in ranges.values()) == whole.hits).all()
    assert list(report.by_position[LOGITS]) == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]


def test_hits_are_counted_in_the_range_where_they_are() -> None:
    text = {LOGITS: [[0, 1, 5], [5, 0, 0]]}
    short = {LOGITS: [[2], [5]]}
    report = summarise("m", "float32", setting_of(SamplingParams(16), exit_layers=(1, 2)), [text, short])
    first, second = report.by_position[LOGITS].values()
    assert (first.comparisons, second.comparisons) == (3, 1)
    assert [first.rate(1, k) for k in KS] == [1 / 3, 1, 1]
    assert [second.rate(1, 5), second.rate(2, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "first", "last", "count"),
    [(16, (1, 2), (15, 16), 8), (128, (1, 16), (113, 128), 8), (3, (1, 1), (3, 3), 3), (20, (1, 3), (19, 20), 7)],
)
def test_ranges_are_those_of_tables_6_to_8(
    tokens: int, first: tuple[int, int], last: tuple[int, int], count: int
) -> None:
    ranges = position_ranges(tokens)
    assert (ranges[0], ranges[-1], len(ranges)) == (first, last, count)
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))


def test_the_file_is_what_the_cost_model_reads(model_folder: ModelFolder, tmp_path: Path) -> None:
    report = report_on(model_folder("llama"), SAMPLED[0])
    (tmp_path / "rates.json").write_text(json.dumps(report.as_dict()))
    rates = read_match_rates(tmp_path / "rates.json")
    assert rates.rates == {(layer, k): report.overall[SHARED_NOISE].rate(layer, k) for layer in (1, 2, 3) for k in KS}


def test_prompts_too_long_for_the_model_are_skipped(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    fitting = "x" * (512 - NEW_TOKENS)
    assert len(load_tokenizer(describe(str(folder))).encode(fitting)) == len(fitting)
    told: list[tuple[int, int]] = []
    meter = MatchRateMeter(OrdinaryDecoding(str(folder)), setting_of())
    report = measured_report(meter, ("x" + fitting, fitting, PROMPTS[0]), lambda *done: told.append(done))
    assert (report.num_prompts, report.skipped_prompts, told) == (2, 1, [(1, 2), (2, 2)])
    with pytest.raises(ValueError, match=r"none of the 1 prompts and max_new_tokens=10 fit the model's 512 positions"):
        report_on(folder, prompts=("x" + fitting,))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exit_layers": (0,)}, "exit_layer=0: with 4 layers choose 1 to 3"),
        ({"exit_layers": (2, 4)}, "exit_layer=4: with 4 layers choose 1 to 3"),
        ({"ks": (0,)}, "k=0: give a whole number of at least 1"),
        ({"cuts": ((2,), (3, 2))}, "cuts='3,2': with 4 layers give layers from 1 to 3, each above the one before"),
        ({"cuts": ((4,),)}, "cuts='4': with 4 layers"),
        ({"ks": (1, 301)}, "k=301 is more than the 300 tokens of the vocabulary"),
        ({"num_layers": 1, "exit_layers": ()}, "the model has 1 layer"),
        ({"exit_layers": ()}, "no exit layers"),
        ({"ks": ()}, "no k"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        setting_of(**changes)


def test_the_shipped_prompts() -> None:
    texts = [prompt.text for prompt in read_prompts("demo")]
    assert len(texts) == len(set(texts)) == 24
    assert [prompt.text for prompt in read_prompts("demo", 2)] == texts[:2]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3: no JSON at column"),
        (b'{"prompt": "a"}\n{"text": "b"}', 'line 2: no text under "prompt"'),
        (b'{"prompt": 5}', 'line 1: no text under "prompt"'),
        (b'{"prompt": ""}', 'line 1: no text under "prompt"'),
        (b'["prompt"]', 'line 1: no text under "prompt"'),
        (b'{"prompt": "\xff"}', "line 1: "),
        (b'{"prompt": "\\ud800"}', "line 1: "),
        (b"[" * 100_000, "line 1: "),
        (b"\n  \n", "holds no prompts"),
        (b"", "holds no prompts"),
    ],
)
def test_broken_prompt_files_are_named_with_the_line(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=named) as caught:
        read_prompts(str(path))
    assert "give one object a line" in str(caught.value)
    assert str(path) in str(caught.value)


def test_each_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("Grüße \r\n\n  {\n".encode() + b"\xff")
    assert [prompt.text for prompt in read_prompts(str(path), 2)] == ["Grüße ", "  {"]
    with pytest.raises(ValueError, match=r"prompts.txt, line 4: no UTF-8 text at byte 0"):
        read_prompts(str(path))


def test_prompts_are_read_as_far_as_wanted(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Grüße, 東京\n", "id": 1}) + "\r\n" + '{"prompt": "b"}\n{')
    assert [prompt.text for prompt in read_prompts(str(path), 2)] == ["Grüße, 東京\n", "b"]
    with pytest.raises(ValueError, match="line 3"):
        read_prompts(str(path))
    with pytest.raises(ValueError, match="limit=0"):
        read_prompts(str(path), 0)
    with pytest.raises(ValueError, match="give a file of prompts, or 'demo'"):
        read_prompts(str(tmp_path))
