"""A sampled choice on the GPU that has the logits, so that neither they nor the CPU's time lie between two passes.

The scores are the CPU's to the last bit: one division and one addition in float32, of noise that the CPU has made. Only
whether the filters keep the highest one is told by sums, which are compared with room for their errors.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ppd_runtime.sampling.noise import gumbel_noise

_MOST_NOISE = 32
"""Positions whose noise is kept."""


class Highest(NamedTuple):
    """The token with the highest noisy score."""

    token: int
    score: float
    """Its own, scaled by the temperature and without noise; not finite if no number says which token is highest."""
    higher: int
    """Tokens whose scaled scores are higher."""
    behind: float
    """How far its scaled score is behind the highest one."""
    share: float
    """Of all chances, those of the token and of all with lower scores, up to float32's rounding."""


class NoiseAhead:
    """A request's noise on a GPU; that of the next position is made beside the pass before it.

    Args:
        seed: the request's.
    """

    def __init__(self, seed: int) -> None:
        self._made = lru_cache(_MOST_NOISE)(partial(_pinned, seed))

    def at(self, position: int, like: Tensor) -> Tensor:
        """The noise of a position, `[vocab_size]` float32, on the device of logits `[..., vocab_size]`."""
        made = self._made(position, like.shape[-1])
        return like.new_empty(made.shape, dtype=torch.float32).copy_(made, non_blocking=True)

    def prepare(self, position: int, size: int) -> None:
        """Have a position's noise made, which may be asked for soon."""
        _helper().submit(self._made, position, size)


def _pinned(seed: int, position: int, size: int) -> Tensor:
    """Noise in page-locked memory, from which a GPU takes it while the program goes on."""
    noise = torch.from_numpy(gumbel_noise(seed, position, size))
    return torch.empty(size, pin_memory=torch.cuda.is_available()).copy_(noise)


@lru_cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "noise")


@torch.inference_mode()
def scaled_there(logits: Tensor, scale: float) -> Tensor:
    """Float32 logits divided by the temperature, where they are.

    By a tensor: a number's reciprocal would be multiplied there, which rounds otherwise.
    """
    return logits if scale == 1 else logits / logits.new_full((1,), scale)


@torch.inference_mode()
def highest_there(scaled: Tensor, noise: Tensor) -> Highest:
    """The token with the highest of `scaled + noise`, `[vocab_size]` float32 each, with one wait for the GPU."""
    place = (scaled + noise).argmax(0, keepdim=True)  # the first among equals, as NumPy's
    score, highest = scaled.gather(0, place), scaled.max()
    chances = (scaled - highest).exp()
    up_to_it = chances.where(scaled < score, 0).sum() + chances.gather(0, place)
    found = (place, score, (scaled > score).sum(0, keepdim=True), highest - score, up_to_it / chances.sum())
    token, own, higher, behind, share = torch.cat([part.double() for part in found]).tolist()
    return Highest(int(token), own, int(higher), behind, share)
