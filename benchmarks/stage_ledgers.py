"""Where each stage's time went, out of a trace: a stage computes, sends, takes in, or waits for the others."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.recording import Figures
from ppd_runtime.pipeline.messages import MAIN
from ppd_runtime.tracing.spans import Kind, ProcessSpans
from ppd_runtime.tracing.trace import Trace

_PARTS = {
    "layers": (Kind.LAYERS,),
    "heads": (Kind.HEAD, Kind.CHOOSE),
    "hops": (Kind.SEND, Kind.RECEIVE, Kind.ENTRIES),
    "waiting": (Kind.WAIT,),
}


def by_stage(traces: Sequence[Trace], tokens: int) -> Figures:
    """Mean milliseconds a token after the first of texts with so many, by stage and part; `python` is the rest.

    The clock runs from the choice of the first token to that of the last, on the last stage.
    """
    sums: dict[str, dict[str, float]] = {}
    for name, process, began_ns, ended_ns in _in_order(traces):
        spent = _spent_ms(process, began_ns, ended_ns)
        row = sums.setdefault(name, dict.fromkeys(spent, 0.0))
        for part, ms in spent.items():
            row[part] += ms / (tokens - 1) / len(traces)
    return sums


def passes(traces: Sequence[Trace], tokens: int) -> Mapping[str, float]:
    """Mean passes a token that a stage begins, by stage, one at the least; in the same time."""
    counts: dict[str, float] = {}
    for name, process, began_ns, ended_ns in _in_order(traces):
        layers = [span for span in process.spans if span.kind == Kind.LAYERS]
        first = min((span.first for span in layers), default=0)
        begun = sum(span.first == first and began_ns <= span.began_ns < ended_ns for span in layers)
        counts[name] = counts.get(name, 0.0) + max(begun, 1) / (tokens - 1) / len(traces)
    return counts


def _in_order(traces: Sequence[Trace]) -> Iterator[tuple[str, ProcessSpans, int, int]]:
    """Each stage of each text, with the moments of its first and its last choice."""
    for trace in traces:
        (last,) = (process for process in trace.processes if process.rank == MAIN)
        chosen = [span.ended_ns for span in last.spans if span.kind == Kind.CHOOSE]
        for process in sorted(trace.processes, key=lambda process: trace.row(process.rank)):
            yield trace.name(process.rank), process, min(chosen), max(chosen)


def _spent_ms(process: ProcessSpans, began_ns: int, ended_ns: int) -> dict[str, float]:
    """By part, of one process between two times."""
    spent = dict.fromkeys(_PARTS, 0.0)
    for span in process.spans:
        within = min(span.ended_ns, ended_ns) - max(span.began_ns, began_ns)
        for part, kinds in _PARTS.items():
            spent[part] += max(within, 0) / 1e6 if span.kind in kinds else 0.0
    return {**spent, "python": (ended_ns - began_ns) / 1e6 - sum(spent.values())}
