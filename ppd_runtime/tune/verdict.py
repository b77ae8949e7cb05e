"""What a plan advises: the best way of decoding with its figures, or "don't" with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORTH_IT = 1.05
"""A speed-up below this is not worth a second device."""


@dataclass(frozen=True)
class Candidate:
    """A way of decoding that a plan may advise."""

    name: str
    ms_per_token: float
    speedup: float
    """Ordinary decoding's time per token over this one's."""
    allowed_speedup: float | None
    """The speed-up if only layers take time; None: unknown."""
    surely_faster: bool = True
    """Whether most texts were faster, not only the median."""
    command: str = ""
    """What runs it; empty: none."""


@dataclass(frozen=True)
class Verdict:
    """What to do."""

    best: str | None
    """The advised way's name; None: ordinary decoding."""
    text: str
    """One sentence for people."""


@dataclass(frozen=True)
class Plan:
    """A verdict with the figures behind it."""

    title: str
    """What was planned, in a line."""
    found: Mapping[str, Any]
    """The figures as JSON values."""
    heads: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    """The figures as a table."""
    verdict: Verdict
    cautions: tuple[str, ...] = ()
    """What makes the figures less certain than they look, a sentence each."""
    cpu_share: float = 1.0
    """The least share of the CPU time that measuring could have which it had; see `host.UNDISTURBED`."""

    def as_dict(self) -> dict[str, Any]:
        """The plan's JSON form."""
        advice = {"gains": self.verdict.best is not None, "best": self.verdict.best, "verdict": self.verdict.text}
        return {**self.found, **advice, "cautions": list(self.cautions)}


def verdict(candidates: Sequence[Candidate], nothing_fits: str, cost: str) -> Verdict:
    """The fastest candidate if it is worth its devices.

    `nothing_fits` is the reason if there is no candidate; `cost` is what takes time besides layers, told if candidates
    are right often enough.
    """
    if not candidates:
        return Verdict(None, f"don't: {nothing_fits}")
    best = max(candidates, key=lambda one: one.speedup)
    if best.speedup >= WORTH_IT and best.surely_faster:
        return Verdict(best.name, f"{_speed(best)}{f' ({best.command})' * bool(best.command)}")
    if best.speedup >= WORTH_IT:
        unsure = "but a quarter of the texts were no faster; more --seconds or prompts may tell"
        return Verdict(None, f"don't: {_speed(best)}, {unsure}")
    reached = f"the best, {best.name}, reaches {best.speedup:.2f} times ordinary decoding's speed, less than {WORTH_IT}"
    return Verdict(None, f"don't: {reached}{_reason(best, cost)}")


def _speed(best: Candidate) -> str:
    return f"{best.name}: {best.ms_per_token:.3g} ms a token, {best.speedup:.2f} times ordinary decoding's speed"


def _reason(best: Candidate, cost: str) -> str:
    if best.allowed_speedup is None:
        return ""
    if best.allowed_speedup < WORTH_IT:
        return f"; its candidates are right too seldom and allow {best.allowed_speedup:.2f} times at the most"
    return f"; its candidates allow {best.allowed_speedup:.2f} times, and {cost} takes the rest"
