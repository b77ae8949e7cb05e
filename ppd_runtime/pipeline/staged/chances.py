"""How likely a guess is right: an exit head's probability, corrected by its hit rate."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Guess = tuple[int, float]
"""A token, and how likely it is to come next."""

_BINS = 8  # bins of a head's probability
_PRIOR_WEIGHT = 4.0  # the head's weight, in trials
_MILLION = 10**6
NETWORK = -1
"""Stands among boundaries for a drafter's network: boundary 0 like the text's drafters, with chances of its own."""


class GuessRecord:
    """Counts how often guesses were right, by boundary, rank and the head's probability."""

    def __init__(self) -> None:
        self._trials: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._hits: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._asked: defaultdict[int, int] = defaultdict(int)
        self._right: defaultdict[int, int] = defaultdict(int)

    def trust(self, boundary: int) -> float:
        """The share of places where the right token was among a boundary's; before experience, more for later ones."""
        prior = 1 - 0.5 ** (boundary + 2)
        return (self._right[boundary] + _PRIOR_WEIGHT * prior) / (self._asked[boundary] + _PRIOR_WEIGHT)

    def chance(self, boundary: int, rank: int, said: float) -> float:
        """The chance that a guess is right if its boundary's head gave it `rank` (from 0) and the chance `said`."""
        cell = _cell(boundary, rank, said)
        return (self._hits[cell] + _PRIOR_WEIGHT * said) / (self._trials[cell] + _PRIOR_WEIGHT)

    def learn(self, boundary: int, guesses: Sequence[Guess], token: int) -> None:
        """Count a boundary's guesses at a place where `token` was right."""
        self._asked[boundary] += 1
        self._right[boundary] += any(guessed == token for guessed, _ in guesses)
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
        """The chance of each named token: the highest that a boundary gives it.

        What the boundary that is right most often does not name has at most what that one leaves.
        The text and a network count as one boundary.
        """
        if not self.by_boundary:
            return {}
        best = max(self.by_boundary, key=calibration.trust)
        found: dict[int, float] = {}
        others: dict[int, float] = {}
        for boundary, guesses in self.by_boundary.items():
            of_best = boundary == best or max(boundary, best) <= 0
            for rank, (token, said) in enumerate(guesses):
                chances = found if of_best else others
                chances[token] = max(chances.get(token, 0.0), calibration.chance(boundary, rank, said))
        left = max(1 - sum(found.values()), 0.0)
        return {
            token: max(found[token], others.get(token, 0.0)) if token in found else min(others[token], left)
            for token in found | others
        }

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
