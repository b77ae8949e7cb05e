"""Comparisons: ways that take turns, figures of numbers made by hand, rows, groups of prompts, and reports."""

import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ppd_runtime.methods.registry import METHODS
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.results import Stats
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.bench import BenchReport, read_groups
from ppd_runtime.tune.compare import CannotDecodeError, Drafting, Pair, Text, Way, compare
from ppd_runtime.tune.figures import allowed_speedup, figures, spread
from ppd_runtime.tune.rows import PRESETS, check_rows, full_settings, parse_rows
from ppd_runtime.tune.tables import markdown_table, plain_table

TOKENS = tuple(range(11))
ORDINARY = Text(
    TOKENS,
    latency_s=11.0,
    first_s=1.0,
    stats=cast(
        Stats,
        SimpleNamespace(ledger_per_token=SimpleNamespace(layers_s=0.9), speculation=None, first_boundary=(), asked=0),
    ),
)
"""A second a token, 0.9 of it in layers."""
DRAFTED = Text(
    TOKENS,
    latency_s=6.0,
    first_s=1.0,
    drafting=Drafting(
        lengths=(4, 4, 2), drafted=(4, 4, 2), accepted=(3, 3, 1), draft_s=2.9, verify_s=2.1, reused_share=1 / 3
    ),
)
"""Three verifications of ten draft steps; of the draft's time, 0.3 s a verification is the newest token's."""


def other(text: Text, equal: int, length: int = 11) -> Text:
    """The same with other tokens behind so many."""
    return replace(text, token_ids=(*TOKENS[:equal], *[99] * (length - equal)))


def predicted(ratio: float) -> Text:
    """Of stages with this E[J]/N."""
    stats = SimpleNamespace(speculation=None, first_boundary=(5, 5), predicted_ratio=ratio)
    return replace(ORDINARY, stats=cast(Stats, stats))


def test_a_ways_figures() -> None:
    found = figures([Pair(ORDINARY, DRAFTED)])
    assert found.tokens_per_second == pytest.approx(11 / 6)
    assert found.speedup.median == pytest.approx(11 / 6)
    assert found.step_speedup is not None
    assert found.step_speedup.median == pytest.approx(2)
    assert (found.ms_per_token, found.ordinary_ms_per_token) == (500, 1000)
    assert found.acceptance_rate == pytest.approx(0.7)
    assert found.mean_accepted_length == pytest.approx(11 / 4)
    assert found.compression_rate == pytest.approx(10 / 3)
    assert found.ctar == pytest.approx((1, 2 / 3, 2 / 3, 0, 0, 0))
    assert found.draft_steps == pytest.approx(10 / 3)
    assert found.draft_cost == pytest.approx((2.9 - 0.9) / 10)
    assert found.verification_cost == pytest.approx((2.1 + 0.9) / 3)
    assert (found.equal_texts, found.equal_tokens) == (1, 1)


def test_the_measured_speedup_is_what_equation_6_allows_where_verifying_costs_a_step() -> None:
    found = figures([Pair(ORDINARY, DRAFTED)])
    assert found.verification_cost == pytest.approx(1)
    assert found.allowed_speedup == pytest.approx(2)


def test_dearer_verification_is_no_part_of_equation_6() -> None:
    assert DRAFTED.drafting is not None
    dear = replace(DRAFTED, latency_s=9.0, drafting=replace(DRAFTED.drafting, verify_s=5.1))
    found = figures([Pair(ORDINARY, dear)])
    assert (found.verification_cost, found.allowed_speedup) == pytest.approx((2, 2))


@pytest.mark.parametrize(("length", "rate", "cost"), [(2.99, 0.9, 0.3), (8.21, 0.98, 0.55), (1.0, 0.5, 0.4)])
def test_equation_6_as_swift_prints_it(length: float, rate: float, cost: float) -> None:
    printed = length * rate / ((length - 1) * cost + rate)  # E(Spd.) = Mα / ((M − 1)c + α)
    assert allowed_speedup(length, (length - 1) / rate, cost) == pytest.approx(printed)


def test_pairs_are_summed_up_by_medians_and_pooled_counts() -> None:
    pairs = [Pair(ORDINARY, DRAFTED), Pair(ORDINARY, other(replace(DRAFTED, latency_s=22.0), 5))]
    found = figures([*pairs, Pair(ORDINARY, other(ORDINARY, 2, 10))])
    assert (found.texts, found.new_tokens) == (3, 32)
    assert found.speedup == spread([11 / 6, 0.5, 10 / 11])
    assert found.tokens_per_second == pytest.approx(32 / 39)
    assert found.equal_texts == pytest.approx(1 / 3)
    assert found.equal_tokens == pytest.approx(18 / 33)


def test_ordinary_decoding_has_no_drafts() -> None:
    found = figures([Pair(ORDINARY, ORDINARY)])
    assert (found.mean_accepted_length, found.compression_rate) == (1, 1)
    assert found.ctar == (None,) * 6
    nothing = (found.acceptance_rate, found.draft_steps, found.draft_cost, found.allowed_speedup)
    assert nothing == (None,) * 4


def test_a_text_of_one_token_says_nothing_of_steps() -> None:
    one = Text((1,), latency_s=1.0, first_s=1.0)
    found = figures([Pair(one, one)])
    assert (found.speedup.median, found.step_speedup, found.ms_per_token, found.allowed_speedup) == (1, *[None] * 3)


def test_what_comes_with_the_first_pass_is_no_step() -> None:
    at_once = replace(DRAFTED, first_tokens=3)
    assert at_once.step_s == pytest.approx(5 / 8)


def test_what_stages_are_allowed_is_weighted_by_ordinary_time() -> None:
    assert figures([Pair(ORDINARY, predicted(0.5))]).allowed_speedup == pytest.approx(2)
    both = [Pair(ORDINARY, predicted(0.5)), Pair(ORDINARY, predicted(1.0))]
    assert figures(both).allowed_speedup == pytest.approx(20 / 15)


def test_theorem_4_1_is_asked_without_the_first_token() -> None:
    stats = SimpleNamespace(speculation=None, first_boundary=(), asked=10, match_rate=0.5, predicted_ratio=8.5 / 11)
    allowed = figures([Pair(ORDINARY, replace(ORDINARY, stats=cast(Stats, stats)))]).allowed_speedup
    assert allowed == pytest.approx(10 / 7.5)
    stats.asked = 0
    assert figures([Pair(ORDINARY, replace(ORDINARY, stats=cast(Stats, stats)))]).allowed_speedup is None


@pytest.mark.parametrize(
    ("one", "other", "equal"), [((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2), ((1,), (2,), 0), ((1,), (1,), 1)]
)
def test_tokens_before_a_difference(one: tuple[int, ...], other: tuple[int, ...], equal: int) -> None:
    pair = Pair(Text(one, 1.0, 1.0), Text(other, 1.0, 1.0))
    assert (pair.equal, pair.identical) == (equal, one == other)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], [7, 7, 7]), ([4.0, 2.0], [2.5, 3, 3.5]), ([5, 1, 3, 2, 4], [2, 3, 4]), ([4, 1, 8, 2], [1.75, 3, 5])],
)
def test_quartiles_are_interpolated_linearly(values: list[float], expected: list[float]) -> None:
    assert astuple(spread(values)) == tuple(expected)


def noted(names: str, asked: list[tuple[str, int, int]], failing: str = "") -> list[Way]:
    """Ways that note each call: name, prompt and seed."""

    def decode(name: str, prompt: Sequence[int], params: SamplingParams) -> Text:
        asked.append((name, prompt[0], params.seed))
        if name == failing and len(asked) > len(names):
            raise CannotDecodeError("it has had enough")
        return Text((prompt[0], params.seed), 1.0, 0.5)

    return [Way(name, partial(decode, name)) for name in names]


def test_each_prompt_begins_with_another_way() -> None:
    asked: list[tuple[str, int, int]] = []
    done: list[tuple[int, int]] = []
    found = compare(
        noted("abc", asked), [[7], [8]], SamplingParams(seed=5), rounds=2, on_prompt=lambda *of: done.append(of)
    )
    assert "".join(name for name, *_ in asked) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [call[1:] for call in asked[::3]] == [(7, 5), (7, 5), (8, 6), (7, 5), (8, 6)]
    assert [place for place, _ in found.turns] == [0, 1, 0, 1]
    assert (set(found.first), done, found.failures) == (set("abc"), [(1, 4), (2, 4), (3, 4), (4, 4)], {})
    assert len(found.pairs("b", "a")) == 4
    assert [pair.text.token_ids for pair in found.pairs("b", "a", [1])] == [(8, 6)] * 2


def test_a_way_that_cannot_decode_stops_no_other() -> None:
    asked: list[tuple[str, int, int]] = []
    found = compare(noted("abc", asked, failing="b"), [[7], [8]], SamplingParams())
    assert found.failures == {"b": "it has had enough"}
    assert (len(found.pairs("c", "a")), found.pairs("b", "a")) == (2, [])
    assert "".join(name for name, *_ in asked) == "abc" + "abc" + "ca"


def test_seconds_go_round_with_three_texts_at_least() -> None:
    asked: list[tuple[str, int, int]] = []
    found = compare(noted("ab", asked), [[7], [8]], SamplingParams(), seconds=0.0)
    assert [place for place, _ in found.turns] == [0, 1, 0]
    assert len(compare(noted("a", asked), [[7]], SamplingParams(), seconds=0.05).turns) > 3


def test_all_is_every_method_there_is() -> None:
    rows = parse_rows("all")
    assert [row.label for row in rows] == list(PRESETS)
    assert rows[0].label == "autoregressive"
    assert set(METHODS) <= {row.method for row in rows}
    assert not any(row.required for row in rows[1:])
    assert {row.settings["stopping"] for row in rows if row.method == "adaspeed"} == {"confidence", "product", "probe"}


def test_rows_with_settings() -> None:
    rows = parse_rows("layerskip:exit_layer=6;num_speculations=2, ppd:k=3,kangaroo:adapter=some/folder,all")
    assert [row.label for row in rows][:4] == [
        "autoregressive",
        "layerskip:exit_layer=6;num_speculations=2",
        "ppd:k=3",
        "kangaroo:adapter=some/folder",
    ]
    assert dict(rows[1].settings) == {"exit_layer": 6, "num_speculations": 2}
    assert full_settings(rows[2]) == {"k": 3, "launcher": "auto"}
    assert (rows[3].settings["adapter"], rows[3].required) == ("some/folder", True)
    assert len(rows) == len(PRESETS) + 3


def test_what_the_model_has_no_part_for_is_left_out_of_all(model_folder) -> None:
    info = describe(str(model_folder("llama")))
    kept, left_out = check_rows(parse_rows("all"), info, SamplingParams())
    assert set(left_out) >= {"kangaroo", "adaspeed:stopping=probe"}
    assert "make one with `ppd train adapter`" in left_out["kangaroo"]
    assert {"ppd:k=1", "layerskip", "prompt_lookup"} <= {row.label for row in kept}
    _, sampled = check_rows(parse_rows("all"), info, SamplingParams(temperature=1.0))
    assert {"assistant_early_exit", "prompt_lookup"} <= set(sampled)
    with pytest.raises(ValueError, match="kangaroo: kangaroo needs adapter=FOLDER"):
        check_rows(parse_rows("all,kangaroo"), info, SamplingParams())


def test_groups_are_categories_or_the_file(tmp_path: Path) -> None:
    rows = [{"category": "math", "turns": ["1 + 1", "2 + 2"]}, {"category": "qa", "prompt": "who"}, {"prompt": "a"}]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    assert read_groups(str(path), 1) == {"math": ["1 + 1"], "qa": ["who"], "bench": ["a"]}
    assert read_groups(str(path))["qa"] == ["who", "who"]
    with pytest.raises(ValueError, match="limit=0"):
        read_groups(str(path), limit=0)


def report(labels: str, failures: dict[str, str] | None = None, cpu_share: float = 1.0) -> BenchReport:
    """All rows draft, and one of two prompts was left out."""
    rows = parse_rows(labels)
    texts = {row.label: DRAFTED for row in rows} | {"autoregressive": ORDINARY}
    found = {label: figures([Pair(ORDINARY, text)]) for label, text in texts.items() if label not in (failures or {})}
    sampling = {"max_new_tokens": 11, "temperature": 0.0}
    where = {"dtype": "float32", "weights": "floats", "device": "cpu", "threads": 1, "compile": False}
    known = {"model": "some", **where, "sampling": sampling, "rounds": 1, "num_prompts": 1, "skipped_prompts": 1}
    conditions = {**known, "machine": "a machine"}
    groups = {"math": found, "qa": found}
    return BenchReport(conditions, tuple(rows), found, groups, failures or {}, {"kangaroo": "no"}, cpu_share)


def test_the_markdown_names_what_is_missing() -> None:
    found = report("layerskip,prompt_lookup", {"prompt_lookup": "TypeError: a | b"})
    lines = found.markdown().splitlines()
    assert "- prompt_lookup failed: TypeError: a | b" in lines
    assert "- kangaroo is left out: no" in lines
    assert "- 1 prompts were left out: too long for the model's positions." in lines
    assert next(line for line in lines if line.startswith("| prompt_lookup")).startswith("| prompt_lookup | failed |")
    assert "| method | math | qa |" in lines
    assert "| layerskip | 1.83 (3.33) | 1.83 (3.33) |" in lines
    assert (
        "| 1.83 (1.83 to 1.83) | 2.00 | 0.70 | 2.75 | all | 2.00 (2.00 to 2.00) | 3.33 | 1.00 | 0.67 |"
        in found.markdown()
    )
    data = found.as_dict()
    assert json.loads(json.dumps(data))["overall"]["layerskip"]["speedup"]["median"] == pytest.approx(11 / 6)
    assert set(data["by_group"]) == {"math", "qa"}


@pytest.mark.parametrize(("share", "notes"), [(0.5, 1), (0.98, 0)])
def test_a_busy_machine_is_noted(share: float, notes: int) -> None:
    found = report("autoregressive", cpu_share=share).notes()
    assert len([note for note in found if note.startswith("Decoding in this process had 50% of the CPU time")]) == notes


def test_a_table_cell_may_hold_anything() -> None:
    assert markdown_table(["a|b"], [["c\nd"]]) == "| a\\|b |\n| --- |\n| c d |"
    assert (
        plain_table(["", "ms"], [["a way", 0.5], ["b", None]])
        == "          ms\n-----  -----\na way  0.500\nb          -"
    )
