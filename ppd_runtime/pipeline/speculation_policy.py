"""Decides how much is guessed: ways of guessing are compared by the time that a token takes, while decoding."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

_BLOCK = 8  # tokens that are timed before ways are compared
_SETTLE = 2  # tokens behind a change of ways that are not timed: what is in flight is still the other way's
_SHARE = 0.01  # of the time, for trying each other way again
_LEAST_LOSS = 0.01  # of the best way's time a token, taken as what trying another one costs at least
_MOST_LOSS = 1.0  # and at most: texts change, so each way is tried again some time
_CLEAR = 0.98  # of its time, for a way to take the place of the one in use
_WEIGHT = 0.5  # of the newest block
_OUTLIER = 8.0  # times the way's time a token: the machine did something else
_MOST_TOGETHER = 4  # requests at once that are told apart


class Guessing(IntEnum):
    """What is guessed; each way includes those before it."""

    NOTHING = 0
    """As ordinary decoding."""
    REPETITIONS = 1
    """What followed the same tokens earlier in the text, which needs no layer."""
    EXITS = 2
    """What exit heads name."""


class SpeculationPolicy(Protocol):
    """What the process that decides tokens asks before it goes on."""

    @property
    def guessing(self) -> Guessing:
        """What to guess for the next token."""
        ...

    def begin(self) -> None:
        """A request begins: its prompt's time is no token's."""
        ...

    def note(self, length: int) -> None:
        """One more token is certain, behind so many others."""
        ...

    def together(self, requests: int) -> None:
        """So many requests are under way from now on."""
        ...

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """Seconds a token of one request alone behind so many others, by `Guessing`; 0 where it was not tried; empty
        where none is timed."""
        ...


def slowed(seconds: float, length: float, heavy_length: float) -> float:
    """A token's time behind `length` others, by that behind none; at `heavy_length` it is twice as much."""
    return seconds * (1 + length / heavy_length)


@dataclass
class Always:
    """Guesses the same way whatever it takes."""

    guessing: Guessing

    def begin(self) -> None:
        """Nothing is timed."""

    def note(self, length: int) -> None:
        """Nothing is timed."""

    def together(self, requests: int) -> None:
        """Nothing is timed."""

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """None."""
        return ()


@dataclass
class _Comparison:
    """Ways of guessing with so many requests at once."""

    ways: Sequence[Guessing]
    seconds: dict[Guessing, float] = field(default_factory=dict)
    """A token's, by the way it was guessed; recent blocks count most."""

    def __post_init__(self) -> None:
        self._saved = dict.fromkeys(self.ways, 0.0)
        self.guessing = min(self.seconds, key=self.seconds.__getitem__) if self.seconds else self.ways[-1]
        self.restart()

    def restart(self) -> None:
        """Time a block from here on."""
        self._unsettled, self._tokens, self._spent = _SETTLE, 0, 0.0

    def add(self, seconds: float) -> None:
        """A token has taken so long."""
        if self._unsettled:
            self._unsettled -= 1
            return
        known = self.seconds.get(self.guessing)
        self._tokens += 1
        self._spent += seconds if known is None else min(seconds, _OUTLIER * known)
        if self._tokens < _BLOCK:
            return
        mean = self._spent / self._tokens
        self.seconds[self.guessing] = mean if known is None else known + _WEIGHT * (mean - known)
        before, spent = self.guessing, self._spent
        self._tokens, self._spent = 0, 0.0
        self.guessing = self._next(spent)
        if self.guessing != before:
            self.restart()

    def _next(self, spent: float) -> Guessing:
        untried = [way for way in self.ways if way not in self.seconds]
        if untried and not self._is_clear():
            return untried[0]
        best = self._best()
        for way in self.ways:
            if way != best:
                self._saved[way] += _SHARE * spent
                if self._saved[way] >= self._price(way, best):
                    self._saved[way] = 0.0
                    return way
        return best

    def _is_clear(self) -> bool:
        """Whether exits are so much quicker than nothing that what is between need not be tried at once."""
        nothing, exits = (self.seconds.get(way) for way in (self.ways[0], self.ways[-1]))
        return nothing is not None and exits is not None and exits < nothing * _CLEAR**4

    def _price(self, way: Guessing, best: Guessing) -> float:
        """Seconds that trying another way costs, by what is known of it."""
        quickest = self.seconds[best]
        loss = self.seconds.get(way, quickest) - quickest
        return (_BLOCK + _SETTLE) * min(max(loss, _LEAST_LOSS * quickest), _MOST_LOSS * quickest)

    def _best(self) -> Guessing:
        """The quickest; the one in use, unless another is clearly quicker."""
        quickest = min(self.seconds, key=self.seconds.__getitem__)
        is_clear = self.seconds[quickest] < _CLEAR * self.seconds[self.guessing]
        return quickest if is_clear else self.guessing


class QuickestGuessing:
    """Uses the way that takes the least time a token here, and tries the others in about a hundredth of the time each.

    A way that was never tried is tried at once. Later each way may be tried again when a hundredth of the time since
    adds up to what that is expected to cost. With more requests at once other ways may be best, so each number of them
    has a comparison of its own.

    Args:
        ways: that there are, in ascending order, `Guessing.NOTHING` first.
        known: `way_seconds` of an earlier run, behind no tokens.
        heavy_length: tokens whose keys and values take as long to read as the weights. Times are compared as they would
            be behind no tokens, for one text is longer than the next.
        clock: gives seconds.
    """

    def __init__(
        self,
        ways: Sequence[Guessing],
        known: Sequence[float] = (),
        heavy_length: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways, self._heavy_length, self._clock = tuple(ways), heavy_length, clock
        self._alone = _Comparison(self._ways, {way: known[way] for way in self._ways if any(known[way : way + 1])})
        self._comparisons = {1: self._alone}
        self._now = self._alone
        self._before: float | None = None

    @property
    def guessing(self) -> Guessing:
        """As `SpeculationPolicy` has it."""
        return self._now.guessing

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """As `SpeculationPolicy` has it."""
        return tuple(slowed(self._alone.seconds.get(way, 0.0), length, self._heavy_length) for way in Guessing)

    def begin(self) -> None:
        """As `SpeculationPolicy` has it."""
        self._before = None

    def note(self, length: int) -> None:
        """As `SpeculationPolicy` has it."""
        now = self._clock()
        if self._before is not None:
            self._now.add((now - self._before) / slowed(1.0, length, self._heavy_length))
        self._before = now

    def together(self, requests: int) -> None:
        """As `SpeculationPolicy` has it."""
        number = min(max(requests, 1), _MOST_TOGETHER)
        if number not in self._comparisons:
            self._comparisons[number] = _Comparison(self._ways, dict(self._alone.seconds))
        if self._comparisons[number] is not self._now:
            self._now = self._comparisons[number]
            self._now.restart()
        self._before = None
