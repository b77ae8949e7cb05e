"""New tensors on the CPU, made several at a time."""

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MOST = 32  # at a time …
_MOST_BYTES = 2**18  # … and bytes of them
_LEAST = 4  # for fewer it takes longer than to make each
_LINE = 64  # bytes: where PyTorch has every tensor's memory begin


class FreshTensors:
    """New tensors of a shape and a dtype, contiguous; what is in them is anything.

    Between two passes the caches are cold: a tensor takes 12 microseconds there, and 32 not much more. Those made
    together share a piece of memory, which lasts as long as one of them. Large ones are made when they are asked for.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._shape, self._dtype = tuple(shape), dtype
        line = _LINE // dtype.itemsize
        self._numbers = max(-(-math.prod(shape) // line), 1) * line
        self._many = min(_MOST, _MOST_BYTES // (self._numbers * dtype.itemsize))
        self._strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._waiting: list[tuple[Tensor, int]] = []

    def take(self) -> tuple[Tensor, int]:
        """One that nobody has, and where its memory is; any thread may ask."""
        if self._many < _LEAST:
            tensor = torch.empty(self._shape, dtype=self._dtype, device="cpu")
            return tensor, tensor.data_ptr()
        while True:
            try:
                return self._waiting.pop()
            except IndexError:
                self._waiting = self._made()

    def _made(self) -> list[tuple[Tensor, int]]:
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference is of no use elsewhere
            memory = torch.empty(self._many * self._numbers, dtype=self._dtype, device="cpu")
            places = range(0, len(memory), self._numbers)
            tensors = [memory.as_strided(self._shape, self._strides, place) for place in places]
        return [(tensor, tensor.data_ptr()) for tensor in tensors]


def joined(states: Sequence[Tensor]) -> Tensor:
    """States `[1, tokens, size]` one behind the other."""
    if not all(one.is_cpu and one.is_contiguous() for one in states):
        return torch.cat(list(states), dim=1)
    sizes, dtype = [one.shape[1] for one in states], states[0].dtype
    row = states[0].shape[2] * dtype.itemsize
    together, place = fresh_tensors((1, sum(sizes), states[0].shape[2]), dtype).take()
    for one, size in zip(states, sizes, strict=True):
        ctypes.memmove(place, one.data_ptr(), size * row)
        place += size * row
    return together


@lru_cache(64)
def fresh_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> FreshTensors:
    """The shared pool of tensors of a shape and a dtype."""
    return FreshTensors(shape, dtype)
