"""Places of tokens → how often each boundary of the staged layout is the first to name the right token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppd_runtime.tune.match_rates import MatchRateSetting, TextPlaces


@dataclass(frozen=True)
class FirstBoundaries:
    """Counts for stages that end after given layers, and one ranking."""

    cuts: tuple[int, ...]
    ks: tuple[int, ...]
    counts: np.ndarray
    """`[ks, stages]` tokens that are first among the k candidates of boundary 1, 2, …, and of none."""

    def shares(self, k: int) -> tuple[float, ...]:
        """The share of the tokens for boundary 1, 2, …, and for none; they sum to 1."""
        row = self.counts[self.ks.index(k)]
        return tuple((row / row.sum()).tolist())

    def as_dict(self) -> dict[str, object]:
        """Cuts, and shares keyed by k as a text."""
        return {"cuts": list(self.cuts), "shares": {str(k): list(self.shares(k)) for k in self.ks}}


def count_first_boundaries(
    setting: MatchRateSetting, texts: Sequence[TextPlaces], ranking: str
) -> tuple[FirstBoundaries, ...]:
    """One for each of the setting's cuts; the texts have a token at least."""
    places = np.concatenate([np.array(text.places[ranking]) for text in texts], axis=1)
    return tuple(
        FirstBoundaries(cuts, setting.ks, np.stack([_count(_at(setting, places, cuts), k) for k in setting.ks]))
        for cuts in setting.cuts
    )


def _at(setting: MatchRateSetting, places: np.ndarray, cuts: tuple[int, ...]) -> np.ndarray:
    """`[boundaries, tokens]` of `[exit_layers, tokens]`."""
    return places[[setting.exit_layers.index(cut) for cut in cuts]]


def _count(places: np.ndarray, k: int) -> np.ndarray:
    """`[stages]` tokens by first boundary, of their places `[boundaries, tokens]`."""
    named = places < k
    never = len(places)
    return np.bincount(np.where(named.any(0), named.argmax(0), never), minlength=never + 1)
