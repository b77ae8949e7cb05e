"""How likely a guess is right: an exit head's probability, corrected by its hit rate."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Guess = tuple[int, float]
"""A token, and how likely it is to come next."""

_BINS = 8  # bins of a head's probability
_PRIOR_WEIGHT = 4.0  # the head's weight, in trials
_OVERRULED = 0.1  # share of the probability left, for a token that a later boundary no longer names
_MILLION = 10**6
NETWORK = -1
"""Stands among boundaries for a drafter's network: boundary 0 like the text's drafters, with chances of its own."""


class GuessRecord:
    """Counts how often guesses were right, by boundary, rank and the head's probability."""

    def __init__(self) -> None:
        self._trials: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._hits: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def chance(self, boundary: int, rank: int, said: float) -> float:
        """The chance that a guess is right if its boundary's head gave it `rank` (from 0) and the chance `said`."""
        cell = _cell(boundary, rank, said)
        return (self._hits[cell] + _PRIOR_WEIGHT * said) / (self._trials[cell] + _PRIOR_WEIGHT)

    def learn(self, boundary: int, guesses: Sequence[Guess], token: int) -> None:
        """Count a boundary's guesses at a place where `token` was right."""
        for rank, (guessed, said) in enumerate(guesses):
            cell = _cell(boundary, rank, said)
            self._trials[cell] += 1
            self._hits[cell] += guessed == token


def _cell(boundary: int, rank: int, said: float) -> tuple[int, int, int]:
    """What a drafter of boundary 0 says stands for its source and the length of a match; a head's is a probability."""
    return boundary, rank, round(100 * said) if boundary == 0 else min(int(said * _BINS), _BINS - 1)


@dataclass
class Successors:
    """The tokens that boundaries have named to follow one node."""

    by_boundary: dict[int, Sequence[Guess]] = field(default_factory=dict)

    def chances(self, calibration: GuessRecord) -> dict[int, float]:
        """The chance of each named token; the latest boundary that named tokens overrules the others.

        The text and a network share boundary 0: there the more confident one counts.
        """
        if not self.by_boundary:
            return {}
        latest = max(self.by_boundary)
        if latest == 0 and NETWORK in self.by_boundary:
            return self._drafted(calibration)
        found = {
            token: calibration.chance(latest, rank, said) for rank, (token, said) in enumerate(self.by_boundary[latest])
        }
        left = _OVERRULED * max(1 - sum(found.values()), 0.0)
        for boundary in self.by_boundary.keys() - {latest}:
            for token, _ in self.by_boundary[boundary]:
                found.setdefault(token, left)
        return found

    def _drafted(self, calibration: GuessRecord) -> dict[int, float]:
        found: dict[int, float] = {}
        for boundary, guesses in self.by_boundary.items():
            for rank, (token, said) in enumerate(guesses):
                found[token] = max(found.get(token, 0.0), calibration.chance(boundary, rank, said))
        return found

    def first_boundary(self, token: int) -> int | None:
        """The first boundary that named the token; None if none did."""
        named = (b for b in sorted(self.by_boundary) if any(token == guess for guess, _ in self.by_boundary[b]))
        return max(first, 0) if (first := next(named, None)) is not None else None

    def learn(self, calibration: GuessRecord, token: int) -> None:
        """Count the guesses of all boundaries: `token` was right."""
        for boundary, guesses in self.by_boundary.items():
            calibration.learn(boundary, guesses, token)


def in_millionths(guesses: Sequence[Guess]) -> tuple[int, ...]:
    """The chances of guesses in millionths, as a message holds them."""
    return tuple(round(_MILLION * min(max(0.0, said), 1.0)) for _, said in guesses)


def of_message(token_ids: Sequence[int], chances: Sequence[int], num_nodes: int) -> list[list[Guess]]:
    """The guesses for each of `num_nodes` nodes, from the lists in which a message holds them."""
    guesses = [(token, said / _MILLION) for token, said in zip(token_ids, chances, strict=True)]
    size = len(guesses) // max(num_nodes, 1)
    return [guesses[i * size : (i + 1) * size] for i in range(num_nodes)]
