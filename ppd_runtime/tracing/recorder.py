"""Takes the time of everything a process does for a request: sums always, single spans if a trace is wanted."""

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tracing.spans import Kind, ProcessSpans, Span

MOST_SPANS = 65_536  # some 10 MB; a token of the main process takes about twelve
MOST_WATCHED = 4096  # not taken yet
_SHOWN = (Kind.LAYERS, Kind.HEAD, Kind.CHOOSE)
_Note = tuple[int, float, float, int, int, int, int, int, str]
"""A span as it is kept, its times in seconds: to make a `Span` of it takes longer than to note it."""


class Recorder:
    """One process' times, in seconds of `time.perf_counter`.

    Each part notes its time when done, one span after the other: they neither overlap nor nest, and what lies
    between two is Python's.
    """

    def __init__(self, most_spans: int = MOST_SPANS) -> None:
        self._most_spans = most_spans
        self.begin()

    def begin(self, traced: bool = False, watched: bool = False) -> None:
        """Forget the last request and start the clock.

        `traced` keeps the newest spans too, `watched` those of passes and choices until `take_watched`.
        """
        self._watched: deque[_Note] | None = deque(maxlen=MOST_WATCHED) if watched else None
        self._spans: deque[_Note] | None = deque(maxlen=self._most_spans) if traced else None
        self._num_spans = 0
        self._spent = [0.0] * len(Kind)
        self._between = 0.0
        self.began = self._last = time.perf_counter()
        """When the request began, by this clock."""

    @property
    def traced(self) -> bool:
        """Whether single spans are kept."""
        return self._spans is not None

    @property
    def computed_s(self) -> float:
        """What passes through layers have taken since `begin`."""
        return self._spent[Kind.LAYERS]

    @property
    def ended(self) -> float:
        """When the last span ended."""
        return self._last

    def pause(self) -> float:
        """Stop the clock, and say when: what follows, up to `resume`, is not the request's."""
        now = time.perf_counter()
        self._between += now - self._last
        self._last = now
        return now

    def resume(self) -> float:
        """Start the clock again, and say when."""
        self._last = time.perf_counter()
        return self._last

    def note(
        self,
        kind: Kind,
        began: float,
        ended: float,
        position: int = -1,
        token: int = -1,
        first: int = -1,
        last: int = -1,
    ) -> None:
        """A span that is over; see `Kind` for the details."""
        self._spent[kind] += ended - began
        self._between += began - self._last
        self._last = ended
        if self._spans is not None or self._watched is not None:
            self._keep((kind, began, ended, position, token, first, last, -1, ""))

    def note_message(self, kind: Kind, began: float, ended: float, peer: int, message: Any) -> None:
        """A span of sending or taking in `message`, or of looking for one that had not come (None)."""
        self._spent[kind] += ended - began
        self._between += began - self._last
        self._last = ended
        if self._spans is not None:
            name = type(message).__name__ if message is not None else ""
            named: Sequence[int] = getattr(message, "token_ids", ())
            token = getattr(message, "token_id", named[0] if len(named) == 1 else -1)
            position = getattr(message, "position", -1)
            self._keep((kind, began, ended, position, token, -1, -1, peer, name))

    def note_verdict(self, position: int, token: int, winner: int) -> None:
        """Whether sub-process `winner` (0: none) was right and in time about the token at `position`."""
        if self._spans is not None:
            now = time.perf_counter()
            self._keep((Kind.HIT if winner else Kind.MISS, now, now, position, token, -1, -1, winner, ""))

    def ledger(self) -> LatencyBreakdown:
        """Where the time went since `begin`, up to this moment or the last `pause`."""
        spent = self._spent
        return LatencyBreakdown(
            layers_s=spent[Kind.LAYERS],
            heads_s=spent[Kind.HEAD] + spent[Kind.CHOOSE],
            hops_s=spent[Kind.SEND] + spent[Kind.RECEIVE] + spent[Kind.ENTRIES],
            waiting_s=spent[Kind.WAIT],
            python_s=self._between,
        )

    def spans(self, rank: int) -> ProcessSpans | None:
        """What was recorded since `begin`; None if no trace was wanted."""
        return None if self._spans is None else _of_process(rank, self._spans, self._num_spans - len(self._spans))

    def take_watched(self, rank: int) -> ProcessSpans | None:
        """Passes and choices since the last time; None if there are none, or they are not watched."""
        if not self._watched:
            return None
        taken, self._watched = self._watched, deque(maxlen=MOST_WATCHED)
        return _of_process(rank, taken, 0)

    def _keep(self, note: _Note) -> None:
        if self._spans is not None:
            self._spans.append(note)
            self._num_spans += 1
        if self._watched is not None and note[0] in _SHOWN:
            self._watched.append(note)


class JointRecorder(Recorder):
    """Notes what is done for several requests at once, for each of them."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        super().__init__()
        self._recorders = recorders

    def note(
        self,
        kind: Kind,
        began: float,
        ended: float,
        position: int = -1,
        token: int = -1,
        first: int = -1,
        last: int = -1,
    ) -> None:
        """Implements `Recorder.note`."""
        for recorder in self._recorders:
            recorder.note(kind, began, ended, position, token, first, last)


def _of_process(rank: int, notes: "deque[_Note]", dropped: int) -> ProcessSpans:
    offset_ns = time.time_ns() - time.perf_counter_ns()
    spans = tuple(Span(note[0], _ns(note[1]), _ns(note[2]), *note[3:]) for note in notes)
    return ProcessSpans(rank, os.getpid(), offset_ns, dropped, spans)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
