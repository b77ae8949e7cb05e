"""The arithmetic of `benchmarks.stages`: predictions beside what was measured, and where each stage's time went."""

import pytest

from benchmarks import stages
from benchmarks.stage_ledgers import besides_ms, by_stage, exit_head_ms, layers, one_row_ms, passes
from ppd_runtime.calibration.simulated_stages import StageTimes
from ppd_runtime.measure.prompt_files import read_prompts
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span
from ppd_runtime.tracing.trace import Trace

MS = 1_000_000


def counted(boundary: int) -> dict[str, object]:
    return {"num_layers": 12, "first_boundary": [int(other == boundary) for other in (1, 2, 3, 4)]}


def test_the_planners_time_by_hand() -> None:
    times = StageTimes(layer=3.0, head=0.4, exit_head=0.5, hop=0.2)
    never = stages.planned_ms(times, (3, 6, 9), 3, 1, counted(4))
    assert never == pytest.approx(4 * (3 * 3.0 + 0.2) + 0.4, rel=0.02)
    dear = StageTimes(layer=3.0, row_cost=0.05)
    assert stages.planned_ms(dear, (3, 6, 9), 1, 1, counted(1)) == pytest.approx(9)
    assert 9 < stages.planned_ms(dear, (3, 6, 9), 3, 8, counted(1)) <= 9 * 1.35, "eight rows cost seven times 5 % more"


def test_what_stages_do_besides_is_counted_by_pass() -> None:
    """Two passes a token of one, one of the other."""
    first = {"layers": 12.0, "heads": 1.0, "hops": 0.5, "waiting": 3.0, "python": 1.5}
    last = {"layers": 9.0, "heads": 1.0, "hops": 0.25, "waiting": 3.0, "python": 0.75}
    begun = {"stage 1": 2.0, "stage 2": 1.0}
    figures = {"by_stage_ms": {"stage 1": first, "stage 2": last}, "passes_by_stage": begun}
    assert besides_ms(figures, ("python",)) == (1.5 / 2 + 0.75) / 2
    assert besides_ms(figures, ("python", "hops")) == (2.0 / 2 + 1.0) / 2
    assert exit_head_ms(figures) == 0.5
    times = StageTimes(layer=3.0, besides=0.5)
    assert stages.planned_ms(times, (3, 6, 9), 3, 1, counted(4)) == pytest.approx(4 * 9.5, rel=0.02)


def test_an_error_is_the_predicted_time_over_the_measured_one() -> None:
    found = stages._beside({"staged_ms": 10.0}, "planned", 9.0)
    assert found == {"planned_ms": 9.0, "planned_error": pytest.approx(-0.1)}
    shown = stages._with_error({"planned_ms": 9.0, "planned_error": -0.1}, "planned")
    assert shown == (9.0, "-10.0%")


def test_a_stages_time_is_cut_to_the_tokens_after_the_first() -> None:
    """Two tokens after the first, from 10 to 30 ms."""
    last = (
        Span(Kind.LAYERS, 0, 9 * MS),
        Span(Kind.CHOOSE, 9 * MS, 10 * MS),
        Span(Kind.WAIT, 12 * MS, 20 * MS),
        Span(Kind.HEAD, 20 * MS, 21 * MS),
        Span(Kind.CHOOSE, 29 * MS, 30 * MS),
        Span(Kind.SEND, 30 * MS, 40 * MS),
    )
    first = (Span(Kind.LAYERS, 5 * MS, 15 * MS), Span(Kind.RECEIVE, 26 * MS, 34 * MS), Span(Kind.HIT, 0, 30 * MS))
    processes = tuple(ProcessSpans(rank, 1, 0, 0, spans) for rank, spans in ((0, last), (1, first)))
    found = by_stage([Trace(4, None, "", processes, cuts=(2,))] * 2, tokens=3)
    assert list(found) == ["stage 1", "stage 2"]
    assert found["stage 1"] == {"layers": 2.5, "heads": 0, "hops": 2, "waiting": 0, "python": 5.5}
    assert found["stage 2"] == {"layers": 0, "heads": 1, "hops": 0, "waiting": 4, "python": 5}


def test_a_pass_is_counted_where_it_begins() -> None:
    """In the time between the choices; one that is left between layers goes on in a span of its own."""
    chosen = [Span(Kind.CHOOSE, at * MS, (at + 1) * MS) for at in (9, 19, 29)]
    of_last = [Span(Kind.LAYERS, at * MS, (at + 1) * MS, first=2, last=4) for at in (5, 15, 25)]
    of_first = [
        Span(Kind.LAYERS, at * MS, (at + 1) * MS, first=first, last=first + 1)
        for at, first in ((2, 0), (3, 1), (12, 0), (13, 1), (16, 0), (22, 0), (23, 1), (31, 0))
    ]
    spans = ((0, tuple(chosen + of_last)), (1, tuple(of_first)))
    traces = [Trace(4, None, "", tuple(ProcessSpans(rank, 1, 0, 0, some) for rank, some in spans), cuts=(2,))] * 2
    assert passes(traces, tokens=3) == {"stage 1": 1.5, "stage 2": 1.0}
    assert layers(traces) == {"stage 1": 1.0, "stage 2": 0.5}


def test_a_layers_time_is_that_of_one_row() -> None:
    figures = {"layer_by_stage_ms": {"stage 1": 3.0, "stage 2": 2.2}, "rows_by_stage": {"stage 1": 6.0, "stage 2": 2.0}}
    assert one_row_ms(figures, row_cost=0.1) == pytest.approx(2.0)
    assert one_row_ms(figures, row_cost=0.0) == pytest.approx(2.6)


def test_prompts_that_repeat_themselves_are_named() -> None:
    texts = [prompt.text for prompt in read_prompts(str(stages._REPEATING_FILE))]
    assert len(texts) == 6
    for text in texts:
        lines = [line for line in text.splitlines() if line.strip()]
        words = [word for line in lines for word in line.split()]
        assert len(set(words)) < 0.7 * len(words)
