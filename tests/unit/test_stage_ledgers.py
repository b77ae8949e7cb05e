"""Where each stage's time went, by the arithmetic of `measure.stage_ledgers`."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.stage_ledgers import StageLedgers, by_stage, is_whole, jitters, layers, passes
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span
from ppd_runtime.tracing.trace import Trace

MS = 1_000_000
LEDGERS = StageLedgers(
    by_stage_ms={
        "stage 1": {"layers": 12.0, "heads": 1.0, "hops": 0.5, "waiting": 3.0, "python": 1.5},
        "stage 2": {"layers": 9.0, "heads": 1.0, "hops": 0.25, "waiting": 3.0, "python": 0.75},
    },
    passes_by_stage={"stage 1": 2.0, "stage 2": 1.0},
    layer_by_stage_ms={"stage 1": 3.0, "stage 2": 2.2},
    rows_by_stage={"stage 1": 6.0, "stage 2": 2.0},
    jitter_by_stage={"stage 1": 0.1, "stage 2": 0.3},
)


def test_what_stages_do_besides_is_counted_by_pass() -> None:
    """Two passes a token of one, one of the other."""
    assert LEDGERS.besides_ms(["python"]) == (1.5 / 2 + 0.75) / 2
    assert LEDGERS.besides_ms() == (2.0 / 2 + 1.0) / 2
    assert LEDGERS.exit_head_ms() == 0.5


def test_a_layers_time_is_that_of_one_row() -> None:
    assert LEDGERS.layer_ms(row_cost=0.1) == pytest.approx(2.0)
    assert LEDGERS.layer_ms() == pytest.approx(2.6)
    short = replace(LEDGERS, rows_by_stage={"stage 1": 0.5, "stage 2": 1.0})
    assert short.layer_ms(row_cost=0.1) == pytest.approx(2.6), "a pass has a row at the least"


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


def test_jitter_is_that_of_a_layer_without_stalls() -> None:
    """Calls of four layers take 1, 2 and 3 ms a layer, in one text with stalls; the other stage has a call alone."""

    def text(*milliseconds: int) -> Trace:
        choices = tuple(Span(Kind.CHOOSE, at * MS, at * MS) for at in (0, 100))
        last = (Span(Kind.LAYERS, 50 * MS, 51 * MS, first=4, last=5), *choices)
        ends = [at + ms for at, ms in zip(range(len(milliseconds)), milliseconds, strict=True)]
        calls = zip(range(len(ends)), ends, strict=True)
        first = tuple(Span(Kind.LAYERS, at * MS, end * MS, first=0, last=4) for at, end in calls)
        return Trace(5, None, "", (ProcessSpans(0, 1, 0, 0, last), ProcessSpans(1, 1, 0, 0, first)), cuts=(4,))

    expected = 2 * (3 - 1) / 1.349 / 2
    assert jitters([text(4, 8, 12)]) == {"stage 1": pytest.approx(expected), "stage 2": 0.0}
    assert jitters([text(4, 8, 12), text(4, 8, 12), text(4, 8, 400)])["stage 1"] == pytest.approx(expected)
    assert jitters([text(8, 8, 8, 8, 8, 8, 8, 400)])["stage 1"] == 0.0
    assert LEDGERS.jitter() == pytest.approx(0.2)


def test_records_of_a_lost_stage_are_not_those_of_the_text() -> None:
    """Two tokens of two stages; a stage is replaced between them, or never heard of again."""

    def recorded(first: tuple[Span, ...], last: tuple[Span, ...], tokens: int = 2) -> SimpleNamespace:
        found = [ProcessSpans(rank, 1, 0, 0, spans) for rank, spans in ((0, last), (1, first)) if spans]
        return SimpleNamespace(trace=Trace(4, None, "", tuple(found), cuts=(2,)), token_ids=[7] * tokens)

    prompt, later = (Span(Kind.LAYERS, at * MS, (at + 1) * MS, first=0, last=2) for at in (1, 12))
    last = (
        Span(Kind.LAYERS, 3 * MS, 4 * MS, first=2, last=4),
        *(Span(Kind.CHOOSE, at * MS, (at + 1) * MS) for at in (5, 15)),
    )
    assert is_whole(recorded((prompt, later), last))
    assert not is_whole(recorded((later,), last)), "stage 1 was replaced"
    assert not is_whole(recorded((), last)), "its records are lost"
    assert not is_whole(recorded((prompt, later), (later, last[-1]))), "the last stage was replaced"
    assert not is_whole(recorded((prompt,), last[:2], tokens=1)), "there is no token after the first"
    assert not is_whole(SimpleNamespace(trace=None, token_ids=[7, 7]))
