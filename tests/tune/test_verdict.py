"""What a plan advises, and which layouts it measures; nothing here runs a model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from ppd_runtime.results import Stats
from ppd_runtime.tune.compare import Pair, Text
from ppd_runtime.tune.layouts import Layout, LayoutFigures, fitting, layout_figures, with_best_threads
from ppd_runtime.tune.plan import made_plan
from ppd_runtime.tune.verdict import Candidate, verdict

STAGES = Candidate("2 stages", 6.0, 1.5, 1.8, command="ppd generate --stages 2")
WHY = {"nothing_fits": "there is one core", "cost": "what processes cost each other"}


def test_the_fastest_is_advised_with_its_command() -> None:
    found = verdict([replace(STAGES, name="k=1", speedup=1.2), STAGES], **WHY)
    assert found.best == "2 stages"
    assert found.text == "2 stages: 6 ms a token, 1.50 times ordinary decoding's speed (ppd generate --stages 2)"


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([], "don't: there is one core"),
        (
            [replace(STAGES, speedup=1.04)],
            "don't: the best, 2 stages, reaches 1.04 times ordinary decoding's speed, less than 1.05; its candidates "
            "allow 1.80 times, and what processes cost each other takes the rest",
        ),
        (
            [replace(STAGES, speedup=0.9, allowed_speedup=1.02)],
            "don't: the best, 2 stages, reaches 0.90 times ordinary decoding's speed, less than 1.05; its candidates "
            "are right too seldom and allow 1.02 times at the most",
        ),
        (
            [replace(STAGES, name="2 threads", speedup=0.9, allowed_speedup=None)],
            "don't: the best, 2 threads, reaches 0.90 times ordinary decoding's speed, less than 1.05",
        ),
        (
            [replace(STAGES, surely_faster=False)],
            "don't: 2 stages: 6 ms a token, 1.50 times ordinary decoding's speed, but a quarter of the texts were no "
            "faster; more --seconds or prompts may tell",
        ),
    ],
)
def test_what_is_not_worth_it_is_not_advised(candidates: list[Candidate], reason: str) -> None:
    found = verdict(candidates, **WHY)
    assert (found.best, found.text) == (None, reason)


@pytest.mark.parametrize(
    ("devices", "num_layers", "threads", "on_cpu", "names"),
    [
        (1, 12, 1, True, ["one stage"]),
        (1, 12, 1, False, ["one stage"]),
        (2, 12, 1, True, ["2 threads", "one stage", "k=1", "2 stages"]),
        (2, 12, 1, False, ["one stage", "k=1", "2 stages"]),
        (4, 12, 2, True, ["4 threads", "8 threads", "one stage", "k=1", "k=3", "2 stages", "3 stages", "4 stages"]),
        (6, 3, 1, True, ["2 threads", "4 threads", "6 threads", "one stage", "k=1", "k=3", "2 stages", "3 stages"]),
        (2, 1, 1, True, ["2 threads"]),
    ],
)
def test_a_layout_fits_where_each_process_has_a_device(
    devices: int, num_layers: int, threads: int, on_cpu: bool, names: list[str]
) -> None:
    layouts = fitting(devices, num_layers, threads, on_cpu)
    assert [layout.name for layout in layouts] == names
    assert all(layout.processes <= devices for layout in layouts)


def test_a_layout_is_asked_for_by_its_options() -> None:
    threads, one, *_, stages = fitting(2, 12, 1, True)
    assert threads.command == "--method autoregressive --threads 2"
    assert one.command == "--stages 1 --threads 1"
    assert stages.command == "--stages 2"


def test_one_stage_has_the_threads_that_ordinary_decoding_is_the_fastest_with() -> None:
    one = Layout("one stage", {"stages": 1, "threads": 1})
    assert with_best_threads(one, []) == with_best_threads(one, [measured("2 threads", 0.9, processes=1)]) == one
    found = with_best_threads(one, [measured("2 threads", 1.5, processes=1)])
    assert (found.name, found.settings) == ("one stage, 2 threads", {"stages": 1, "threads": 2})
    stages = Layout("2 stages", {"stages": 2}, 2)
    assert with_best_threads(stages, [measured("2 threads", 1.5, processes=1)]) is stages


def pair(ordinary_s: float, own_s: float, equal: int = 11) -> Pair:
    """A text of eleven tokens that take so long behind the first."""
    ordinary, own = (Text(tuple(range(11)), 1 + 10 * step, 1.0) for step in (ordinary_s, own_s))
    stats = SimpleNamespace(speculation=None, first_boundary=(10, 0), predicted_ratio=0.5)
    tokens = (*range(equal), *[99] * (11 - equal))
    return Pair(ordinary, replace(own, token_ids=tokens, stats=cast(Stats, stats)))


def test_figures_are_medians_of_the_texts_own() -> None:
    layout = Layout("2 stages", {"stages": 2}, 2)
    found = layout_figures(layout, [pair(0.010, 0.005), pair(0.020, 0.008), pair(0.030, 0.010)], cpu_share=0.9)
    assert (found.texts, found.tokens, found.identical) == (3, 33, True)
    assert found.ms_per_token == pytest.approx(8)
    assert found.ordinary_ms_per_token == pytest.approx(20)
    assert (found.speedup_low, found.speedup, found.speedup_high) == pytest.approx((2.25, 2.5, 2.75))
    assert found.allowed_speedup == pytest.approx(2)
    assert found.realised_saving == pytest.approx((1 - 1 / 2.5) / (1 - 1 / 2))
    assert not layout_figures(layout, [pair(0.010, 0.005, equal=4)]).identical


KNOWN = {
    "model": "m",
    "num_layers": 12,
    "dtype": "float32",
    "weights": "floats",
    "compiled": False,
    "devices": 2,
    "device": "cpu",
    "threads": 1,
    "exit_head": None,
    "drafter": None,
    "seconds": 8.0,
}


def measured(name: str, speedup: float, identical: bool = True, processes: int = 2) -> LayoutFigures:
    layout = Layout(name, {"stages": 2} if processes > 1 else {"threads": 2}, processes)
    figures = (3, 33, 10 / speedup, 10.0, speedup, speedup - 0.01, speedup + 0.01, 1.9)
    return LayoutFigures(layout, *figures, identical, cpu_share=0.5)


def test_a_plan_ranks_and_advises() -> None:
    found = made_plan(KNOWN, [measured("2 stages", 1.3), measured("2 threads", 1.5, processes=1)], {})
    assert [row["name"] for row in found.as_dict()["layouts"]] == ["2 threads", "2 stages"]
    assert found.verdict.best == "2 threads"
    assert "(ppd generate --model m --method autoregressive --threads 2)" in found.verdict.text
    (busy,) = found.cautions
    assert busy.startswith("Measuring had 50% of the CPU time")


def test_trained_exits_are_part_of_the_command() -> None:
    found = made_plan(KNOWN | {"exit_head": "heads"}, [measured("2 stages", 1.3)], {})
    assert found.verdict.text.endswith("(ppd generate --model m --stages 2 --exit-head heads)")
    found = made_plan(KNOWN | {"drafter": "name/head"}, [measured("2 stages", 1.3)], {})
    assert found.verdict.text.endswith("(ppd generate --model m --stages 2 --drafter name/head)")


def test_a_layout_with_other_tokens_is_named_and_not_advised() -> None:
    found = made_plan(KNOWN, [measured("2 stages", 1.3, identical=False), measured("k=1", 1.1)], {})
    assert found.verdict.best == "k=1"
    assert "Some texts are not ordinary decoding's: 2 stages." in found.cautions


@pytest.mark.parametrize(
    ("known", "left_out", "text"),
    [
        (KNOWN | {"devices": 1}, {}, "don't: a layout needs two CPU cores at least, and there is 1"),
        (KNOWN | {"devices": 1, "device": "cuda"}, {}, "don't: a layout needs two GPUs at least, and there is 1"),
        (KNOWN, {"2 stages": "no room"}, "don't: no layout could be measured here"),
    ],
)
def test_without_figures_the_reason_is_told(known: dict[str, object], left_out: dict[str, str], text: str) -> None:
    found = made_plan(known, [], left_out)
    assert found.verdict.text == text
    assert list(found.cautions) == [f"{name} was left out: {reason}" for name, reason in left_out.items()]
