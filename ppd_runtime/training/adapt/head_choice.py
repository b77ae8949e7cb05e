"""The head that a layer gets: what its guesses gain on held-out tokens over what asking it costs."""

from collections.abc import Mapping
from dataclasses import dataclass

OWN = "own"
"""Stands for the model's own head where no trained one is better; it is saved as an affine map that changes nothing."""
EARLIER = "earlier"
"""Stands for the head that was there before, where no new one is better."""
CHOSEN_BY_K = 3
"""The number of guesses that stages name for a token by default."""


@dataclass(frozen=True)
class TriedHead:
    """A trained head of one kind."""

    right: float
    """The share of held-out tokens that it names among its `CHOSEN_BY_K` best."""
    numbers: int
    """Its own weights, which each of its guesses reads."""

    def gain(self, model_numbers: int) -> float:
        """The share of a pass that a guess saves at most, less the guess' own share of a pass' weights."""
        return self.right - self.numbers / model_numbers


@dataclass(frozen=True)
class HeadChoice:
    """The kind of a layer's head, and what each kind reached."""

    layer: int
    kind: str
    """One of the kinds that are trained, `OWN` or `EARLIER`."""
    tried: dict[str, TriedHead]
    """By kind."""


def choose_head(layer: int, tried: Mapping[str, TriedHead], model_numbers: int) -> HeadChoice:
    """The kind with the largest gain, for a model with so many weights; the first of several."""
    return HeadChoice(layer, max(tried, key=lambda kind: tried[kind].gain(model_numbers)), dict(tried))
