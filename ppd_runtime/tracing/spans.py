"""What one process did with its time: spans on the clock of `time.perf_counter_ns`, which a host's processes share."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a process was doing, or, for the last two, what it found out."""

    LAYERS = 0
    """A pass through layers `first` to `last` (half-open), of tokens that begin at `position`."""
    HEAD = 1
    """Final norm and head over the newest hidden state."""
    CHOOSE = 2
    """From logits to the token at `position`, or to the candidates for it."""
    SEND = 3
    """Encoding a `message` and handing it over to the transport, for `peer`."""
    RECEIVE = 4
    """Taking in a `message` of `peer`; also a wait while it is on its way. Without a message: finding none."""
    ENTRIES = 5
    """Copying key/value entries out of the caches or into them."""
    WAIT = 6
    """Waiting for somebody who is not done yet."""
    HIT = 7
    """The early start of `token` by sub-process `peer` is used."""
    MISS = 8
    """No early start of `token` was there in time."""


class Span(NamedTuple):
    """One stretch of a process' time; times in nanoseconds, -1 if something does not apply."""

    kind: int
    began_ns: int
    ended_ns: int
    position: int = -1
    token: int = -1
    first: int = -1
    last: int = -1
    peer: int = -1
    message: str = ""
    """Name of the message's type."""


@dataclass(frozen=True)
class ProcessSpans:
    """What one process recorded of one request."""

    rank: int
    """0 is the main process, 1 to k the sub-processes."""
    pid: int
    wall_offset_ns: int
    """Lead of its wall clock (since 1970) over its `time.perf_counter_ns`."""
    dropped: int
    """Older spans that there was no room for."""
    spans: tuple[Span, ...]
