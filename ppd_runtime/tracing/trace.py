"""A generation on one clock: what every process did, and when; as a Chrome trace, which https://ui.perfetto.dev opens.

Times are `time.perf_counter_ns`, which on Linux is one clock for all processes of a host. Each process' offset to its
wall clock is noted too, to align traces of several hosts, as well as those clocks agree.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.settings.layouts import Layout, PaperLayout
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span

Event = dict[str, Any]
_VERDICTS = (Kind.HIT, Kind.MISS)


@dataclass(frozen=True)
class Hop:
    """A message that arrived."""

    sender: int
    receiver: int
    sent: Span
    received: Span


@dataclass(frozen=True)
class Trace:
    """One request's spans; positions count from 0, layers are half-open ranges and count from 0."""

    num_layers: int
    layout: Layout | None
    """How the processes share the layers; None if one process decodes."""
    conditions: str
    """What a reader of its times has to know, such as that devices were emulated."""
    processes: tuple[ProcessSpans, ...]
    """By rank, the main process or the last stage first; those of lost processes are missing."""

    @property
    def exit_layer(self) -> int | None:
        """The paper layout's; None in others."""
        return self.layout.exit_layer if isinstance(self.layout, PaperLayout) else None

    def and_then(self, later: "Trace") -> "Trace":
        """The trace of both parts of a request; for a replaced process, only the new one's."""
        known = {process.rank: process for process in self.processes}
        processes = [_joined(known.get(process.rank), process) for process in later.processes]
        return replace(later, processes=tuple(processes))

    def name(self, rank: int) -> str:
        """What a process is called."""
        return self.layout.name(rank) if self.layout else "ordinary decoding"

    def row(self, rank: int) -> int:
        """A process' place from above, from 0: stages stand in their order."""
        return self.layout.place(rank) if self.layout else rank

    def hops(self) -> Iterator[Hop]:
        """The messages between the processes whose sending and arrival were both recorded."""
        sent: defaultdict[tuple[object, ...], deque[Span]] = defaultdict(deque)
        for process in self.processes:
            for span in process.spans:
                if span.kind == Kind.SEND:
                    sent[process.rank, span.peer, span.message, span.position, span.token].append(span)
        for process in self.processes:
            for span in process.spans:
                letters = sent.get((span.peer, process.rank, span.message, span.position, span.token))
                if span.kind == Kind.RECEIVE and letters:
                    yield Hop(span.peer, process.rank, letters.popleft(), span)

    def chrome(self) -> Event:
        """The trace in Chrome's format: complete events, instants for hits and misses, flows for messages."""
        origin = min((span.began_ns for process in self.processes for span in process.spans), default=0)
        events = [event for process in self.processes for event in self._process_events(process, origin)]
        for number, hop in enumerate(self.hops(), 1):
            events += _flow(hop, number, origin)
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {
                "clock": "time.perf_counter_ns of one host",
                "origin_ns": origin,
                "conditions": self.conditions,
                "num_layers": self.num_layers,
                "exit_layer": None,
                "cuts": [],
                "rows": None,
                "k": None,
                **(self.layout.shape() if self.layout else {}),
                "processes": [
                    {
                        "name": self.name(process.rank),
                        "pid": process.pid,
                        "wall_clock_offset_ns": process.wall_offset_ns,
                        "dropped_spans": process.dropped,
                    }
                    for process in self.processes
                ],
            },
        }

    def write(self, path: Path) -> None:
        """Write the Chrome trace into a JSON file.

        Raises:
            ValueError: if the file cannot be written.
        """
        with atomic_file(path) as unfinished:
            unfinished.write_text(json.dumps(self.chrome()) + "\n", encoding="utf-8")

    def _process_events(self, process: ProcessSpans, origin: int) -> Iterator[Event]:
        place = _place(process.rank)
        name = f"{self.name(process.rank)} (pid {process.pid})"
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": self.name(process.rank)}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": self.row(process.rank)}}
        for span in process.spans:
            event = {"name": _title(span), "cat": Kind(span.kind).name.lower(), "ts": _us(span.began_ns - origin)}
            if span.kind in _VERDICTS:
                yield event | {"ph": "i", "s": "p"} | place | {"args": _details(span)}
            else:
                length = _us(span.ended_ns - span.began_ns)
                yield event | {"ph": "X", "dur": length} | place | {"args": _details(span)}


def _place(rank: int) -> Event:
    return {"pid": rank + 1, "tid": rank + 1}  # threads of one process get places of their own too


def _flow(hop: Hop, number: int, origin: int) -> list[Event]:
    """An arrow from one span into another; a moment before its end the receiving span is still there to bind to."""
    common = {"name": hop.sent.message, "cat": "hop", "id": number}
    arrival = max(hop.received.ended_ns - 1, hop.sent.began_ns)
    return [
        common | {"ph": "s", "ts": _us(hop.sent.began_ns - origin)} | _place(hop.sender),
        common | {"ph": "f", "bp": "e", "ts": _us(arrival - origin)} | _place(hop.receiver),
    ]


def _title(span: Span) -> str:
    kind = Kind(span.kind)
    if kind == Kind.LAYERS:
        return f"layers {span.first + 1} to {span.last}"
    return f"{kind.name.lower()} {span.message}".strip()


def _details(span: Span) -> Event:
    """What applies to the span."""
    details = {"position": span.position, "token": span.token, "first_layer": span.first, "last_layer": span.last}
    known = {name: value for name, value in details.items() if value >= 0}
    if span.message:
        known |= {"receiver" if span.kind == Kind.SEND else "sender": span.peer}
    return known | ({"winner": span.peer} if span.kind == Kind.HIT else {})


def _us(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _joined(before: ProcessSpans | None, later: ProcessSpans) -> ProcessSpans:
    if before is None or before.pid != later.pid:
        return later
    return replace(later, dropped=before.dropped + later.dropped, spans=(*before.spans, *later.spans))
