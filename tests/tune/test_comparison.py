"""A comparison's figures, from numbers made by hand; its rows and its groups of prompts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppd_runtime.methods.registry import METHODS
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tune.comparison.figures import (
    Agreement,
    Drafting,
    Pair,
    TextRun,
    allowed_speedup,
    method_figures,
    spread,
)
from ppd_runtime.tune.comparison.methods import common_start
from ppd_runtime.tune.comparison.prompt_groups import read_groups
from ppd_runtime.tune.comparison.report import ComparisonReport, Conditions
from ppd_runtime.tune.comparison.rows import LeftOut, check_rows, full_settings, parse_rows, presets
from ppd_runtime.tune.markdown import markdown_table

ORDINARY = TextRun(new_tokens=11, latency_s=11.0, first_s=1.0, layers_s=0.9)
"""A second a token, 0.9 of it in layers."""
DRAFTED = TextRun(
    new_tokens=11,
    latency_s=6.0,
    first_s=1.0,
    drafting=Drafting(
        lengths=(4, 4, 2), drafted=(4, 4, 2), accepted=(3, 3, 1), draft_s=2.9, verify_s=2.1, reused_share=1 / 3
    ),
)
"""Three verifications of ten draft steps; of the draft's time, 0.3 s a verification is the newest token's."""
SAME = Agreement(11, 11)


def test_a_methods_figures() -> None:
    figures = method_figures([Pair(ORDINARY, DRAFTED, SAME)])
    assert figures.tokens_per_second == pytest.approx(11 / 6)
    assert figures.speedup.median == pytest.approx(11 / 6)
    assert figures.step_speedup is not None
    assert figures.step_speedup.median == pytest.approx(2)
    assert figures.acceptance_rate == pytest.approx(0.7)
    assert figures.mean_accepted_length == pytest.approx(11 / 4)
    assert figures.compression_rate == pytest.approx(10 / 3)
    assert figures.ctar == pytest.approx((1, 2 / 3, 2 / 3, 0, 0, 0))
    assert figures.draft_steps == pytest.approx(10 / 3)
    assert figures.draft_cost == pytest.approx((2.9 - 0.9) / 10)
    assert figures.verification_cost == pytest.approx((2.1 + 0.9) / 3)
    assert (figures.equal_texts, figures.equal_tokens, figures.largest_gap) == (1, 1, None)


def test_the_measured_speedup_is_what_equation_6_allows_where_verifying_costs_a_step() -> None:
    figures = method_figures([Pair(ORDINARY, DRAFTED, SAME)])
    assert figures.verification_cost == pytest.approx(1)
    assert figures.allowed_speedup == pytest.approx(2)
    assert figures.pooled_step_speedup == pytest.approx(2)


def test_dearer_verification_is_no_part_of_equation_6() -> None:
    assert DRAFTED.drafting is not None
    dear = replace(DRAFTED, latency_s=9.0, drafting=replace(DRAFTED.drafting, verify_s=5.1))
    figures = method_figures([Pair(ORDINARY, dear, SAME)])
    assert (figures.verification_cost, figures.allowed_speedup) == pytest.approx((2, 2))


@pytest.mark.parametrize(("length", "rate", "cost"), [(2.99, 0.9, 0.3), (8.21, 0.98, 0.55), (1.0, 0.5, 0.4)])
def test_equation_6_as_swift_prints_it(length: float, rate: float, cost: float) -> None:
    printed = length * rate / ((length - 1) * cost + rate)  # E(Spd.) = Mα / ((M − 1)c + α)
    assert allowed_speedup(length, (length - 1) / rate, cost) == pytest.approx(printed)


def test_pairs_are_summed_up_by_medians_and_pooled_counts() -> None:
    slow = replace(DRAFTED, latency_s=22.0)
    pairs = [Pair(ORDINARY, DRAFTED, SAME), Pair(ORDINARY, slow, Agreement(5, 11, 0.25))]
    figures = method_figures([*pairs, Pair(ORDINARY, ORDINARY, Agreement(2, 10, 0.5))])
    assert (figures.texts, figures.new_tokens) == (3, 33)
    assert figures.speedup == spread([11 / 6, 0.5, 1.0])
    assert figures.speedup.median == 1
    assert (figures.speedup.low, figures.speedup.high) == pytest.approx((0.75, 17 / 12))
    assert figures.tokens_per_second == pytest.approx(33 / 39)
    assert figures.equal_texts == pytest.approx(1 / 3)
    assert figures.equal_tokens == pytest.approx(18 / 32)
    assert figures.largest_gap == 0.5


def test_speedups_of_all_texts_together() -> None:
    slower = replace(ORDINARY, latency_s=21.0)
    figures = method_figures([Pair(ORDINARY, DRAFTED, SAME), Pair(slower, ORDINARY, SAME)])
    assert figures.pooled_step_speedup == pytest.approx((10 * 1 + 10 * 2) / (10 * 0.5 + 10 * 1))


def test_ordinary_decoding_has_no_drafts() -> None:
    figures = method_figures([Pair(ORDINARY, ORDINARY, SAME)])
    assert (figures.mean_accepted_length, figures.compression_rate) == (1, 1)
    assert figures.ctar == (None,) * 6
    nothing = (figures.acceptance_rate, figures.draft_steps, figures.draft_cost, figures.allowed_speedup)
    assert nothing == (None,) * 4


def test_a_text_of_one_token_says_nothing_of_steps() -> None:
    one = TextRun(new_tokens=1, latency_s=1.0, first_s=1.0)
    figures = method_figures([Pair(one, one, Agreement(1, 1))])
    assert (figures.speedup.median, figures.step_speedup, figures.allowed_speedup) == (1, None, None)


def test_what_comes_with_the_first_pass_is_no_step() -> None:
    at_once = replace(DRAFTED, first_tokens=3)
    assert at_once.step_s == pytest.approx(5 / 8)


def test_the_theorem_of_another_method_is_weighted_by_ordinary_time() -> None:
    halved, same = (replace(ORDINARY, predicted_ratio=ratio) for ratio in (0.5, 1.0))
    assert method_figures([Pair(ORDINARY, halved, SAME)]).allowed_speedup == pytest.approx(2)
    figures = method_figures([Pair(ORDINARY, halved, SAME), Pair(ORDINARY, same, SAME)])
    assert figures.allowed_speedup == pytest.approx(20 / 15)


@pytest.mark.parametrize(
    ("one", "other", "equal"), [((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 3), 2), ((1,), (2,), 0), ((1,), (1,), 1)]
)
def test_common_start(one: tuple[int, ...], other: tuple[int, ...], equal: int) -> None:
    assert common_start(one, other) == equal


def test_all_is_every_method_there_is() -> None:
    rows = parse_rows("all")
    assert [row.label for row in rows] == list(presets())
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
    assert len(rows) == len(presets()) + 3


def test_what_the_model_has_no_part_for_is_left_out_of_all(model_folder) -> None:
    info = describe(str(model_folder("llama")))
    kept, left_out = check_rows(parse_rows("all"), info, SamplingParams())
    missing = {row.label: row.reason for row in left_out}
    assert set(missing) >= {"kangaroo", "adaspeed:stopping=probe"}
    assert "make one with `ppd train adapter`" in missing["kangaroo"]
    assert {"ppd:k=1", "layerskip", "prompt_lookup"} <= {row.label for row in kept}
    _, sampled = check_rows(parse_rows("all"), info, SamplingParams(temperature=1.0))
    assert {"assistant_early_exit", "prompt_lookup"} <= {row.label for row in sampled}
    with pytest.raises(ValueError, match="kangaroo: kangaroo needs adapter=FOLDER"):
        check_rows(parse_rows("all,kangaroo"), info, SamplingParams())


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """One file of categories, in Spec-Bench's shape, and one without."""
    rows = [{"category": "math", "turns": ["1 + 1", "2 + 2"]}, {"category": "qa", "prompt": "who"}]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows, *rows]))
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return [str(tmp_path / "bench.jsonl"), str(tmp_path / "plain.jsonl")]


def test_groups_of_prompts(files: list[str]) -> None:
    bench, plain = files
    assert [(p.group, p.text) for p in read_groups([bench], 1)] == [("math", "1 + 1"), ("qa", "who")]
    assert [(p.group, p.text) for p in read_groups([plain])] == [("plain", "a"), ("plain", "b")]
    both = [p.group for p in read_groups(files, 2)]
    assert both == ["bench, math"] * 2 + ["bench, qa"] * 2 + ["plain"] * 2
    assert {p.group for p in read_groups([bench], categories=["qa"])} == {"qa"}


def test_mistaken_groups(files: list[str]) -> None:
    bench, plain = files
    with pytest.raises(ValueError, match=r"category 'art': .* has math, qa"):
        read_groups([bench], categories=["art"])
    with pytest.raises(ValueError, match=r"category 'art': .* has none"):
        read_groups([plain], categories=["art"])
    with pytest.raises(ValueError, match="is given twice"):
        read_groups([plain, plain])
    with pytest.raises(ValueError, match="limit=0"):
        read_groups([plain], limit=0)


def report(labels: str, failures: dict[str, str] | None = None) -> ComparisonReport:
    """Twice as fast as LayerSkip's, all rows behind it."""
    rows = parse_rows(labels)
    runs = {row.label: DRAFTED for row in rows} | {
        "autoregressive": ORDINARY,
        "layerskip": replace(DRAFTED, latency_s=12.0),
    }
    pairs = {label: [Pair(ORDINARY, run, SAME)] for label, run in runs.items() if label not in (failures or {})}
    sampling = {"max_new_tokens": 11, "temperature": 0.0}
    known = Conditions("some", "float32", "floats", "cpu", 1, False, sampling, 1, 2, 1, "a machine", {"torch": "2"})
    return ComparisonReport(
        known, tuple(rows), {"math": pairs, "qa": pairs}, failures or {}, (LeftOut("kangaroo", "no"),)
    )


def test_adaspeeds_table_1() -> None:
    found = report("layerskip,adaspeed:stopping=confidence,adaspeed,adaspeed:threshold=0.5,ppd").table_1()
    assert list(found) == ["LayerSkip (constant length)", "Draft & Verify (confidence)", "AdaSPEED (no probe)"]
    assert [label for label, *_ in found.values()] == ["layerskip", "adaspeed:stopping=confidence", "adaspeed"]
    assert [over for *_, over in found.values()] == pytest.approx([1, 2, 2])
    assert report("adaspeed").table_1() == {}


def test_the_markdown_names_what_is_missing() -> None:
    shown = report("layerskip,prompt_lookup", {"prompt_lookup": "TypeError: a | b"}).markdown()
    lines = shown.splitlines()
    assert "- prompt_lookup failed: TypeError: a | b" in lines
    assert "- kangaroo is left out: no" in lines
    assert "- 1 of 2 prompts were longer" in shown
    assert next(line for line in lines if line.startswith("| prompt_lookup")).startswith("| prompt_lookup | failed |")
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert len(set(tables[:5])) == 1
    assert "| method | math | qa |" in lines
    assert "| layerskip | 0.92 (3.33) | 0.92 (3.33) |" in lines
    assert "| layerskip | 0.91 (0.91 to 0.91) | 0.91 | 2.00 | -54.5% | 3.33 | 0.200 | 1.000 |" in lines


@pytest.mark.parametrize(("cpu_s", "notes"), [(5.5, 1), (10.8, 0)])
def test_a_busy_machine_is_noted(cpu_s: float, notes: int) -> None:
    busy = replace(ORDINARY, cpu_s=cpu_s)
    quiet = report("autoregressive")
    found = replace(quiet, pairs={"qa": {"autoregressive": [Pair(busy, busy, SAME)]}}).notes()
    assert len([note for note in found if note.startswith("Ordinary decoding had 50% of the CPU time")]) == notes


def test_a_table_cell_may_hold_anything() -> None:
    assert markdown_table(["a|b"], [["c\nd"]]) == "| a\\|b |\n| --- |\n| c d |"
