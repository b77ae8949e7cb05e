"""Where each stage's time went, out of a trace: a stage computes, sends, takes in, or waits for the others."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppd_runtime.pipeline.messages import MAIN
from ppd_runtime.results import GenerationResult
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span
from ppd_runtime.tracing.trace import Trace

_PARTS = {
    "layers": (Kind.LAYERS,),
    "heads": (Kind.HEAD, Kind.CHOOSE),
    "hops": (Kind.SEND, Kind.RECEIVE, Kind.ENTRIES),
    "waiting": (Kind.WAIT,),
}
_QUARTILES_APART = 1.349  # standard deviations, of a normal distribution


@dataclass(frozen=True)
class StageLedgers:
    """Where the time of some texts went, by stage, in milliseconds."""

    by_stage_ms: Mapping[str, Mapping[str, float]]
    """See `by_stage`."""
    passes_by_stage: Mapping[str, float]
    """See `passes`."""
    layer_by_stage_ms: Mapping[str, float]
    """See `layers`."""
    rows_by_stage: Mapping[str, float]
    """See `rows`."""
    jitter_by_stage: Mapping[str, float]
    """See `jitters`."""

    @staticmethod
    def of(results: Sequence[GenerationResult], tokens: int) -> "StageLedgers":
        """What the traces of texts with so many tokens say."""
        traces = [result.trace for result in results if result.trace]
        spent = by_stage(traces, tokens), passes(traces, tokens), layers(traces)
        return StageLedgers(*spent, rows(results), jitters(traces))

    def besides_ms(self, parts: Sequence[str] = ("python", "hops")) -> float:
        """What these parts of a stage's time take for a pass, in the mean of all stages."""
        spent = self.by_stage_ms.items()
        return statistics.fmean(sum(of[part] for part in parts) / self.passes_by_stage[name] for name, of in spent)

    def exit_head_ms(self) -> float:
        """What a boundary's head takes for a pass: in the mean of all stages but the last."""
        guessing = list(self.by_stage_ms)[:-1]
        return statistics.fmean(self.by_stage_ms[name]["heads"] / self.passes_by_stage[name] for name in guessing)

    def layer_ms(self, row_cost: float = 0.0) -> float:
        """What a layer takes for a pass of one row, in the mean of all stages, where a further one adds this share."""
        return statistics.fmean(
            ms / (1 + row_cost * max(0.0, self.rows_by_stage[name] - 1)) for name, ms in self.layer_by_stage_ms.items()
        )

    def jitter(self) -> float:
        """How much a layer's time differs from pass to pass, in the mean of all stages; see `jitters`."""
        return statistics.fmean(self.jitter_by_stage.values())


def is_whole(result: GenerationResult) -> bool:
    """Whether the records are of the whole text from its prompt on, unlike those of a stage that was lost meanwhile."""
    trace = result.trace
    if trace is None or len(trace.processes) != len(trace.cuts) + 1:
        return False
    chosen = [span.began_ns for process in trace.processes if process.rank == MAIN for span in _choices(process)]
    return len(chosen) == len(result.token_ids) > 1 and all(
        min((span.began_ns for span in _layers(process)), default=chosen[0]) < chosen[0] for process in trace.processes
    )


def by_stage(traces: Sequence[Trace], tokens: int) -> Mapping[str, Mapping[str, float]]:
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
        spans = _layers(process)
        first = min((span.first for span in spans), default=0)
        begun = sum(span.first == first and began_ns <= span.began_ns < ended_ns for span in spans)
        counts[name] = counts.get(name, 0.0) + max(begun, 1) / (tokens - 1) / len(traces)
    return counts


def layers(traces: Sequence[Trace]) -> Mapping[str, float]:
    """Mean milliseconds of one layer in a pass, by stage, between the choices of the first and the last token."""
    spent: dict[str, list[tuple[float, int]]] = {}
    for name, of_text in _calls(traces):
        spent.setdefault(name, []).extend(of_text)
    return {name: sum(ms for ms, _ in of) / max(1, sum(count for _, count in of)) for name, of in spent.items()}


def jitters(traces: Sequence[Trace]) -> Mapping[str, float]:
    """Standard deviation of a layer's time within a text, as a share of its median, by stage; the median of all texts.

    By their quartiles, so that a stall, which `layers` has in its mean, does not count. Layers of one call are taken to
    differ independently.
    """
    found: dict[str, list[float]] = {}
    for name, of_text in _calls(traces):
        if len(of_text) > 1:
            low, middle, high = statistics.quantiles([ms / count for ms, count in of_text], n=4)
            deviation = (high - low) / _QUARTILES_APART / middle
            found.setdefault(name, []).append(deviation * statistics.fmean(count for _, count in of_text) ** 0.5)
    return {name: statistics.median(found.get(name, [0.0])) for name, _ in _calls(traces)}


def rows(results: Sequence[GenerationResult]) -> Mapping[str, float]:
    """Mean rows of a pass, by stage, a prompt's pass among them."""
    rows, passed = dict[str, float](), dict[str, float]()
    for result in results:
        if trace := result.trace:
            for process in trace.processes:
                name, stats = trace.name(process.rank), result.stats
                of_stage = stats.sub_layer_passes[process.rank - 1] if process.rank else stats.main_layer_passes
                rows[name] = rows.get(name, 0) + of_stage
                passed[name] = passed.get(name, 0) + sum(span.last - span.first for span in _layers(process))
    return {name: rows[name] / passed[name] for name in rows}


def _layers(process: ProcessSpans) -> list[Span]:
    return [span for span in process.spans if span.kind == Kind.LAYERS]


def _calls(traces: Sequence[Trace]) -> Iterator[tuple[str, list[tuple[float, int]]]]:
    """Each stage of each text, with what calls took between the choices of the first and the last token, in
    milliseconds, and how many layers they ran.
    """
    for name, process, began_ns, ended_ns in _in_order(traces):
        spans = [span for span in _layers(process) if began_ns <= span.began_ns < ended_ns]
        yield name, [((span.ended_ns - span.began_ns) / 1e6, span.last - span.first) for span in spans]


def _choices(process: ProcessSpans) -> list[Span]:
    return [span for span in process.spans if span.kind == Kind.CHOOSE]


def _in_order(traces: Sequence[Trace]) -> Iterator[tuple[str, ProcessSpans, int, int]]:
    """Each stage of each text, with the moments of its first and its last choice."""
    for trace in traces:
        (last,) = (process for process in trace.processes if process.rank == MAIN)
        chosen = [span.ended_ns for span in _choices(last)]
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
