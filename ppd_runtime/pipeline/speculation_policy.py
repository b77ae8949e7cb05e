"""Decides how much to guess: compares ways of guessing, while decoding, by the time that a token takes."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

_BLOCK = 8  # tokens that are timed before ways are compared
_SETTLE = 2  # untimed tokens after a change of ways: what is in flight is still the old way's
_SHARE = 0.01  # share of the time to retry each other way …
_EARLY_SHARE = 0.05  # … that has been timed for fewer than so many blocks in this run
_LEAST_LOSS = 0.01  # least cost of trying another way, as a share of the best way's time a token
_MOST_LOSS = 1.0  # most cost: texts change, so each way is tried again some time
_CLEAR = 0.98  # share of the current way's time that another has to beat
_BLOCKS = 2  # the newest ones of a way, of which the quicker counts: the machine may have been busy in one
_OUTLIER = 8.0  # times the way's time a token: the machine did something else
_KEPT = 0.9  # decay of earlier blocks in the fit of growth with the text
_LEAST_SPREAD = 0.05  # least length spread for that fit, in heavy lengths
_MOST_WRONG = 4.0  # largest factor a given heavy length is off by
_MOST_TOGETHER = 4  # requests at once that are told apart
_GAIN = 0.75  # share of a token's time without guesses below which guesses gain, so a layout decodes
_REQUESTS = 3  # least requests over which that share is a mean: texts differ, and the first finds cold caches
_ONE_PROCESS = 3  # its place among the seconds of ways, after those of `Guessing`


class Guessing(IntEnum):
    """What is guessed; each way includes those before it."""

    NOTHING = 0
    """Ordinary decoding."""
    REPETITIONS = 1
    """What followed the same tokens earlier in the text, which needs no layer."""
    EXITS = 2
    """What exit heads and networks name."""


class SpeculationPolicy(Protocol):
    """What the process that decides tokens asks before it goes on."""

    @property
    def guessing(self) -> Guessing:
        """What to guess for the next token."""
        ...

    def begin(self) -> None:
        """A request begins: its prompt is not timed."""
        ...

    def note(self, length: int) -> None:
        """One more token is certain, after `length` others."""
        ...

    def together(self, requests: int) -> None:
        """From now on this many requests run."""
        ...

    def one_process(self, length: float) -> "SpeculationPolicy | None":
        """Asked when a request of about `length` tokens begins and the deciding process has all layers: the policy with
        which it decodes alone; None if the layout decodes.
        """
        ...

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """Seconds a token of one request alone, after `length` tokens, by `Guessing`, and last those of one process; 0
        for a way not tried; empty if none is timed."""
        ...


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

    def one_process(self, length: float) -> SpeculationPolicy | None:
        """The layout decodes."""

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """No times: nothing is timed."""
        return ()


class Growth:
    """How a token's time grows with the text before it; learned from tokens for which nothing was guessed.

    Args:
        heavy_length: tokens after which a token takes about twice as long as after none.
    """

    def __init__(self, heavy_length: float = math.inf) -> None:
        self._expected = self.heavy_length = heavy_length
        self._sums: tuple[float, ...] = (0.0,) * 5

    def moved(self, seconds: float, length: float, to: float) -> float:
        """A token's time after `to` others, from that after `length`."""
        return seconds * (1 + to / self.heavy_length) / (1 + length / self.heavy_length)

    def add(self, length: float, seconds: float) -> None:
        """Fit tokens that took `seconds` each after `length` others: least squares; recent tokens count most."""
        values = (1.0, length, length * length, seconds, length * seconds)
        self._sums = tuple(_KEPT * before + value for before, value in zip(self._sums, values, strict=True))
        lengths, squares, times, products = (one / self._sums[0] for one in self._sums[1:])
        variance = squares - lengths**2
        if self._expected == math.inf or variance < (_LEAST_SPREAD * self._expected) ** 2:
            return
        slope = (products - lengths * times) / variance
        base = times - slope * lengths
        found = base / slope if slope > 0 and base > 0 else math.inf
        self.heavy_length = min(max(found, self._expected / _MOST_WRONG), self._expected * _MOST_WRONG)


class _Comparison:
    """Compares ways at one number of requests.

    Args:
        ways: all of them.
        growth: makes times after texts of different lengths comparable.
        known: seconds of a token after no others, by way; until the way is timed.
    """

    def __init__(self, ways: Sequence[Guessing], growth: Growth, known: Mapping[Guessing, float]) -> None:
        self.ways, self._growth, self._length, self._known = ways, growth, 0, known
        self._blocks = {way: deque[tuple[float, float]](maxlen=_BLOCKS) for way in ways}
        self._saved = dict.fromkeys(self.ways, 0.0)
        self.guessing = min(known, key=known.__getitem__) if known else self.ways[-1]
        self.restart()

    def seconds(self, length: float) -> dict[Guessing, float]:
        """A token's seconds after `length` others, by its way."""
        found = {way: self._growth.moved(seconds, 0.0, length) for way, seconds in self._known.items()}
        for way, blocks in self._blocks.items():
            if blocks:
                found[way] = min(self._growth.moved(seconds, before, length) for seconds, before in blocks)
        return found

    def share(self, way: Guessing) -> float:
        """The share of the time to retry a way."""
        return _SHARE if len(self._blocks[way]) == _BLOCKS else _EARLY_SHARE

    def restart(self) -> None:
        """Start to time a block."""
        self._unsettled, self._tokens, self._lengths, self._spent = _SETTLE, 0, 0, 0.0

    def add(self, seconds: float, length: int) -> None:
        """A token after `length` others took `seconds`."""
        if self._unsettled:
            self._unsettled -= 1
            return
        self._length = length
        known = self.seconds(length).get(self.guessing)
        self._tokens += 1
        self._lengths += length
        self._spent += seconds if known is None else min(seconds, _OUTLIER * known)
        if self._tokens < _BLOCK:
            return
        mean, behind = self._spent / self._tokens, self._lengths / self._tokens
        if self.guessing == Guessing.NOTHING:
            self._growth.add(behind, mean)
        self._blocks[self.guessing].append((mean, behind))
        before, spent = self.guessing, self._spent
        self._tokens, self._lengths, self._spent = 0, 0, 0.0
        self.guessing = self._next(spent)
        if self.guessing != before:
            self.restart()

    def _next(self, spent: float) -> Guessing:
        seconds = self.seconds(self._length)
        untried = [way for way in self.ways if way not in seconds]
        if untried and not self._is_clear(seconds):
            return untried[0]
        best = self._best(seconds)
        for way in self.ways:
            if way != best:
                self._saved[way] += self.share(way) * spent
                if self._saved[way] >= self._price(seconds, way, best):
                    self._saved[way] = 0.0
                    return way
        return best

    def _is_clear(self, seconds: Mapping[Guessing, float]) -> bool:
        """Whether exits are so much quicker than nothing that the ways between can be tried later."""
        nothing, exits = (seconds.get(way) for way in (self.ways[0], self.ways[-1]))
        return nothing is not None and exits is not None and exits < nothing * _CLEAR**4

    def _price(self, seconds: Mapping[Guessing, float], way: Guessing, best: Guessing) -> float:
        """Seconds that trying another way costs, as far as known."""
        quickest = seconds[best]
        loss = seconds.get(way, quickest) - quickest
        return (_BLOCK + _SETTLE) * min(max(loss, _LEAST_LOSS * quickest), _MOST_LOSS * quickest)

    def _best(self, seconds: Mapping[Guessing, float]) -> Guessing:
        """The way in use, unless another is clearly quicker."""
        quickest = min(seconds, key=seconds.__getitem__)
        return quickest if seconds[quickest] < _CLEAR * seconds[self.guessing] else self.guessing


class QuickestGuessing:
    """Uses the way with the least time a token here, and spends about a hundredth of the time on trying each other way.

    A way that was never tried is tried at once. Later a way is tried again once a hundredth of the time since then
    covers the expected cost; a twentieth, while this run has hardly timed the way. The best way may depend on the
    number of requests at once, so each number has a comparison.

    A request that begins alone may be decoded by one process, if guesses gain little over some requests, and if that
    takes less than the layout's best way. The slower choice is tried again by the same rule as a way.

    Args:
        ways: all of them, ascending, `Guessing.NOTHING` first.
        known: `way_seconds` of an earlier run, after no tokens.
        heavy_length: see `Growth`.
        clock: gives seconds.
    """

    def __init__(
        self,
        ways: Sequence[Guessing],
        known: Sequence[float] = (),
        heavy_length: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ways, self._clock, self._growth = tuple(ways), clock, Growth(heavy_length)
        timed = {way: known[way] for way in self._ways if any(known[way : way + 1])}
        self._alone = _Comparison(self._ways, self._growth, timed)
        self._comparisons = {1: self._alone}
        self._now = self._alone
        self._before: float | None = None
        one_process = {Guessing.NOTHING: known[_ONE_PROCESS]} if any(known[_ONE_PROCESS:]) else {}
        self._one_process = _Comparison(self._ways[:1], Growth(heavy_length), one_process)
        self._saved_tokens = 0.0
        self._requests, self._share = (_REQUESTS, self._best_share()) if timed else (0, 0.0)

    @property
    def guessing(self) -> Guessing:
        """Implements `SpeculationPolicy.guessing`."""
        return self._now.guessing

    def way_seconds(self, length: float) -> tuple[float, ...]:
        """Implements `SpeculationPolicy.way_seconds`."""
        seconds, one_process = self._alone.seconds(length), self._one_process.seconds(length)
        times = *(seconds.get(way, 0.0) for way in Guessing), one_process.get(Guessing.NOTHING, 0.0)
        return times if any(times) else ()

    def begin(self) -> None:
        """Implements `SpeculationPolicy.begin`."""
        self._before = None
        if Guessing.NOTHING in self._alone.seconds(0):
            self._requests = min(self._requests + 1, _REQUESTS)
            self._share += (self._best_share() - self._share) / self._requests

    def begin_in_one_process(self) -> None:
        """`begin` for a request that one process decodes."""
        self._before = None

    def note(self, length: int) -> None:
        """Implements `SpeculationPolicy.note`."""
        now = self._clock()
        if self._before is not None:
            self._now.add(now - self._before, length)
        self._before = now

    def together(self, requests: int) -> None:
        """Implements `SpeculationPolicy.together`."""
        number = min(max(requests, 1), _MOST_TOGETHER)
        if number not in self._comparisons:
            self._comparisons[number] = _Comparison(self._ways, self._growth, self._alone.seconds(0))
        if self._comparisons[number] is not self._now:
            self._now = self._comparisons[number]
            self._now.restart()
        self._before = None

    def one_process(self, length: float) -> SpeculationPolicy | None:
        """Implements `SpeculationPolicy.one_process`."""
        if self._now is not self._alone or not self._chooses_one_process(length):
            return None
        self._one_process.restart()
        return _OneProcess(self)

    def note_in_one_process(self, length: int) -> None:
        """`note` for a request that one process decodes; its tokens are not timed while others run."""
        now = self._clock()
        if self._before is not None and self._now is self._alone:
            self._one_process.add(now - self._before, length)
        self._before = now

    def _best_share(self) -> float:
        """The best way's time of a token, as a share of the time without guesses; 0 if that is unknown."""
        seconds = self._alone.seconds(0)
        return min(seconds.values()) / seconds[Guessing.NOTHING] if Guessing.NOTHING in seconds else 0.0

    def _chooses_one_process(self, length: float) -> bool:
        if self._requests < _REQUESTS or self._share <= _GAIN:
            return False
        of_one = self._one_process.seconds(length).get(Guessing.NOTHING)
        if of_one is None:
            return True
        best = min(self._alone.seconds(length).values())
        loss = min(max(abs(best - of_one) / min(best, of_one), _LEAST_LOSS), _MOST_LOSS)
        self._saved_tokens += (_SHARE if of_one < best else self._one_process.share(Guessing.NOTHING)) * length
        tries_again = self._saved_tokens >= loss * length
        if tries_again:
            self._saved_tokens = 0.0
        return (of_one < best) != tries_again


class _OneProcess:
    """The policy of a request that one process decodes: nothing is guessed, and its tokens' times are compared."""

    guessing = Guessing.NOTHING

    def __init__(self, policy: QuickestGuessing) -> None:
        self._policy = policy
        self.begin, self.note = policy.begin_in_one_process, policy.note_in_one_process
        self.together, self.way_seconds = policy.together, policy.way_seconds

    def one_process(self, length: float) -> SpeculationPolicy | None:
        """It decodes already."""
