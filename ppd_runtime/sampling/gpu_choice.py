"""A sampled choice on the GPU that has the logits, so that neither they nor the CPU's time lie between two passes.

The scores are the CPU's to the last bit: one division and one addition in float32, of noise that the CPU has made. Only
whether the filters keep the highest one is told by sums, which are compared with room for their errors.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ppd_runtime.sampling.highest import NO_TOKEN, choices_there, first_and_values, named_with_values, with_chances
from ppd_runtime.sampling.noise import gumbel_noise
from ppd_runtime.sampling.params import SamplingParams

_MOST_NOISE = 32
"""Positions whose noise is kept."""
DOUBT = 1e-3
"""Share of all probability by which single-precision sums may be wrong."""
LEAST_SURE = 1e-30
"""Share of the highest probability: lower ones may be lost in dividing by a sum."""


Ask = Callable[..., Tensor]
"""Finds a few float64 numbers in logits `[rows, vocab_size]` and further tensors, without waiting for their device."""


@dataclass(frozen=True)
class UnreadLogits:
    """Logits that a GPU has not computed: a recording of the head finds what is asked of them too."""

    shape: tuple[int, int]
    """Rows, those without a token too, and the vocabulary's size."""
    device: torch.device
    read: Callable[[], Tensor]
    """Computes the logits and nothing else; they have a row for each token, or none for one."""
    find: Callable[[Ask, Sequence[Tensor]], Tensor]
    """Computes what is asked, given all rows' logits and these tensors. There is a recording for each `Ask`, which
    always takes as many tensors."""


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

    @classmethod
    def told(cls, numbers: Tensor) -> "Highest":
        """From `highest_of`'s numbers, with one wait for the GPU."""
        token, own, higher, behind, share = numbers.tolist()
        return cls(int(token), own, int(higher), behind, share)


class NoiseAhead:
    """A request's noise on a GPU; that of the next position is made beside the pass before it.

    Args:
        seed: the request's.
    """

    def __init__(self, seed: int) -> None:
        self._made = lru_cache(_MOST_NOISE)(partial(_pinned, seed))

    def at(self, position: int, like: Tensor | UnreadLogits) -> Tensor:
        """The noise of a position, `[vocab_size]` float32, on the device of logits `[..., vocab_size]`."""
        made = self._made(position, like.shape[-1])
        return _empty(made.shape, like).copy_(made, non_blocking=True)

    def of_rows(self, positions: Sequence[int], like: UnreadLogits) -> Tensor:
        """The noise of the first rows' positions, `[rows, vocab_size]`; 0 in the others."""
        noise = _empty(like.shape, like).zero_()
        for row, position in enumerate(positions):
            noise[row].copy_(self._made(position, like.shape[-1]), non_blocking=True)
        return noise

    def prepare(self, position: int, size: int) -> None:
        """Have a position's noise made, which may be asked for soon."""
        _helper().submit(self._made, position, size)


def _empty(shape: Sequence[int], like: Tensor | UnreadLogits) -> Tensor:
    """Float32, where the logits are."""
    if isinstance(like, UnreadLogits):
        return torch.empty(shape, device=like.device, dtype=torch.float32)
    return like.new_empty(shape, dtype=torch.float32)


def _pinned(seed: int, position: int, size: int) -> Tensor:
    """Noise in page-locked memory, from which a GPU takes it while the program goes on."""
    noise = torch.from_numpy(gumbel_noise(seed, position, size))
    return torch.empty(size, pin_memory=torch.cuda.is_available()).copy_(noise)


@lru_cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "noise")


class GpuChoices:
    """A request's choices where the logits are, if nothing but noise and filters changes them.

    Args:
        params: the request's.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params, self._noise = params, NoiseAhead(params.seed)

    def choice(self, logits: Tensor | UnreadLogits, position: int) -> int | None:
        """The choice from `[vocab_size]` logits, if there is one and the filters surely keep it; else None."""
        params = self._params
        if params.greedy:
            token = int(_found(logits, choices_of)[0])
            return None if token == NO_TOKEN else token
        top_p = 1.0 if params.top_p is None else params.top_p
        if params.top_k and top_p < 1:
            return None
        found = Highest.told(_found(logits, highest_of, self._scale(logits), self._noise.at(position, logits)))
        self._noise.prepare(position + 1, logits.shape[-1])
        if not math.isfinite(found.score) or (params.top_k and not found.higher < params.top_k):
            return None
        if params.min_p and not math.exp(-found.behind) > max(params.min_p * (1 + DOUBT), LEAST_SURE):
            return None
        return found.token if top_p == 1 or found.share > 1 - top_p + DOUBT else None

    def noisy(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """The scores of logits `[rows, vocab_size]` at these positions."""
        noise = [self._noise.at(position, logits) for position in positions]
        return logits / self._scale(logits) + torch.stack(noise)

    def likeliest(self, logits: UnreadLogits, positions: Sequence[int], k: int) -> list[list[tuple[int, float]]]:
        """The k likeliest choices at each row's position, each with its chance; see `Sampler.guesses`."""
        inputs = [] if self._params.greedy else [self._scale(logits), self._noise.of_rows(positions, logits)]
        found = _found(logits, likeliest_of(k, self._params.greedy), *inputs).tolist()
        return with_chances(*named_with_values(found[: len(positions)], k))

    def _scale(self, logits: Tensor | UnreadLogits) -> Tensor:
        """The temperature there, `[1]`: a number's reciprocal would be multiplied, which rounds otherwise."""
        return _empty((1,), logits).fill_(self._params.temperature)


@torch.inference_mode()
def _found(logits: Tensor | UnreadLogits, ask: Ask, *inputs: Tensor) -> Tensor:
    return logits.find(ask, inputs) if isinstance(logits, UnreadLogits) else ask(logits[None], *inputs)


def choices_of(logits: Tensor) -> Tensor:
    """Where each row's logits are highest, or NO_TOKEN, `[rows]`."""
    return choices_there(logits).double()


def highest_of(logits: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """The numbers of `Highest` for the first row, given the temperature and the noise of its position."""
    scaled = logits[0] / scale
    place = (scaled + noise).argmax(0, keepdim=True)  # the first among equals, as NumPy's
    score, highest = scaled.gather(0, place), scaled.max()
    chances = (scaled - highest).exp()
    up_to_it = chances.where(scaled < score, 0).sum() + chances.gather(0, place)
    found = (place, score, (scaled > score).sum(0, keepdim=True), highest - score, up_to_it / chances.sum())
    return torch.cat([part.double() for part in found])


@lru_cache
def likeliest_of(k: int, greedy: bool) -> Ask:
    """Finds each row's k highest scores with their chances: the numbers of `named_with_values`.

    Above temperature 0 it is also given the temperature and the rows' noise.
    """

    def highest(logits: Tensor) -> Tensor:
        return first_and_values(logits, logits.softmax(-1), k)

    def noisy(logits: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        scores = logits / scale + noise
        return first_and_values(scores, (scale * scores).softmax(-1), k)

    return highest if greedy else noisy
