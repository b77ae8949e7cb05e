"""What a token waits for where the only sub-process runs ahead, followed from one token to the next.

There is no formula for it: how far ahead the sub-process is when a token contradicts it depends on the hits before. So
the clocks of both processes are followed over a fixed series of chances, the same for every match rate.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ppd_runtime.checks import check_share
from ppd_runtime.cost_model.machine_costs import Calibration

BATCH = 8
"""Tokens whose entries go out together."""
_TOKENS = 6000
_MULTIPLIER, _MODULUS = 16807, 2**31 - 1  # the "minimal standard" generator


@dataclass(frozen=True)
class RunAheadCosts:
    """Expected values for a token after the first."""

    waiting: float
    """Milliseconds that early starts and entries cost the main process: it waits, or runs the layers itself."""
    recomputed: float
    """Passes of the main process over d/2 layers, for what comes later than those take."""
    strays: float
    """Candidates that are started behind a wrong one, less those that are never started."""


def entry_messages(match_rate: float) -> float:
    """Messages with entries for a token: a run of n hits has ⌈n / 8⌉, `p / (1 + p + … + p⁷)` on average."""
    return match_rate / sum(match_rate**n for n in range(BATCH))


def follow(early: int, match_rate: float, times: Calibration) -> RunAheadCosts:
    """What running ahead comes to with `early` = d/2 layers; the means over hits and misses, weighted with their rate.

    Raises:
        ValueError: for a match rate outside [0, 1].
    """
    check_share("match_rate", match_rate)
    race = _Race(early, times)
    totals, counts = {True: [0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0]}, {True: 0, False: 0}
    for chance in chances():
        right = chance < match_rate
        costs = race.hit() if right and race.in_time else race.miss(right)
        totals[right] = [total + cost for total, cost in zip(totals[right], costs, strict=True)]
        counts[right] += 1
    weights = {True: match_rate / max(1, counts[True]), False: (1 - match_rate) / max(1, counts[False])}
    return RunAheadCosts(
        *(weights[True] * a + weights[False] * b for a, b in zip(totals[True], totals[False], strict=True))
    )


def chances() -> Iterator[float]:
    """A fixed series of numbers between 0 and 1, one for each token that is followed."""
    state = 1
    for _ in range(_TOKENS):
        state = state * _MULTIPLIER % _MODULUS
        yield state / _MODULUS


class _Race:
    """Both processes' times around the main process' decision for a token, which is time 0.

    The sub-process' candidate for that token is finished at `finish`, and the one behind it is begun then, or when the
    token before is there, which left `since` ago. A token that contradicts it finds it in the middle of a pass, which
    it ends. Entries leave when a token was not its own, so after hits the main process waits for them.
    """

    def __init__(self, early: int, times: Calibration) -> None:
        layers = early * times.layer_ms
        alone = times.pass_ms + layers * (times.half_factor + times.contention - 1)
        self.hop, self.patience = times.hop_ms, layers
        self.half_pass = times.pass_ms + layers * times.contention
        self.catching_up = times.message_ms + alone
        self.cycle = times.exit_head_ms + 2 * times.message_ms + self.catching_up
        self.shipping = times.export_ms + times.message_ms
        self.hit_time = times.head_ms + (3 + 1 / BATCH) * times.message_ms + alone
        self.miss_time = times.head_ms + 3 * times.message_ms + 2 * self.half_pass
        self.finish, self.since, self.owed = -self.hop, self.miss_time, 0

    @property
    def in_time(self) -> bool:
        """Whether the candidate is named by now, and its early start no later than the main process' own."""
        return self.finish + self.hop <= self.patience and self.finish - self.catching_up + self.hop <= 0

    def hit(self) -> tuple[float, float, float]:
        """The candidate is right; what it costs, by the fields of `RunAheadCosts`."""
        waited = max(0.0, self.finish + self.hop)
        begun = max(self.finish, self.hop - self.since)
        self.finish = begun + self.cycle + self.shipping / BATCH - (waited + self.hit_time)
        self.since, self.owed = self.hit_time, self.owed + 1
        return waited, 0, 0

    def miss(self, right: bool) -> tuple[float, float, float]:
        """The candidate is wrong, or `right` but too late; what it costs, by the fields of `RunAheadCosts`."""
        begun = max(self.finish, self.hop - self.since)
        unnamed, stray = self.finish - self.cycle > self.hop, not right and begun < self.hop
        free = max(self.hop, self.finish - self.cycle if unnamed else begun + self.cycle if stray else self.finish)
        shipped = free + (self.shipping if self.owed else 0)
        waited, recomputed = self._entries(shipped + self.hop)
        follows = begun if right and not unnamed else shipped + self.catching_up
        self.since, self.owed = waited + self.miss_time, 0
        self.finish = follows + self.cycle - self.since
        return waited + right * self.half_pass, recomputed + right, stray - unnamed

    def _entries(self, arrival: float) -> tuple[float, int]:
        """The milliseconds until the entries of the hits before are there or run again, and how many are."""
        if not self.owed:
            return 0.0, 0
        again = min(self.owed, math.ceil(max(0.0, arrival - self.patience) / self.half_pass))
        return max(0.0, min(arrival, self.patience)) + again * self.half_pass, again
