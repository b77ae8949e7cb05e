"""A request's random numbers: noise keyed by (seed, position), and draws in one order."""

import math
from enum import IntEnum

import numpy as np
from torch import Tensor


class Stream(IntEnum):
    """What random numbers are for: each use has numbers of its own."""

    NOISE = 0
    """The shared noise."""
    DRAWS = 1
    """A request's `Draws`."""


class Draws:
    """A request's random numbers, each drawn once: nothing earlier can depend on it.

    Args:
        seed: the request's (u64).
        prompt_length: its prompt's tokens: a continuation of a text with the same seed gets other numbers.
        earlier: requests whose numbers may still influence this one, so the same seed must give it others.
    """

    def __init__(self, seed: int, prompt_length: int, earlier: int = 0) -> None:
        self._generator = _generator(seed, prompt_length, Stream.DRAWS, earlier)

    def uniform(self) -> float:
        """A uniform number in [0, 1)."""
        return float(self._generator.random())

    def token(self, chances: Tensor) -> int:
        """A draw from `[vocab_size]` float64 probabilities, which need not sum to 1; never one of probability 0.

        Raises:
            ValueError: if they are no probabilities.
        """
        up_to_each = chances.cpu().numpy().cumsum()
        total = float(up_to_each[-1])
        if not 0 < total < float("inf"):
            raise ValueError(f"the probabilities of the next token sum to {total}: choose another dtype, as float32")
        below = min(self.uniform() * total, math.nextafter(total, 0))  # so near 0 the product may round up to the total
        return int(up_to_each.searchsorted(below, side="right"))


def gumbel_noise(seed: int, position: int, size: int) -> np.ndarray:
    """`[size]` float32 standard Gumbel noise, the same in every process for the same seed (u64) and position."""
    noise = _generator(seed, position, Stream.NOISE).random(size)
    with np.errstate(divide="ignore"):  # a uniform of exactly 0 is an impossible choice: -inf
        for _ in range(2):  # in place: for large vocabularies fresh memory takes most of the time
            np.negative(np.log(noise, out=noise), out=noise)
    return noise.astype(np.float32)


def _generator(seed: int, position: int, stream: Stream, number: int = 0) -> np.random.Generator:
    """Philox counts up in the counter's first word; the last two keep sequences apart."""
    key, counter = np.array([seed, position], dtype=np.uint64), np.array([0, 0, number, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
