"""The likeliest tokens by a head's scores, in one call; `ranking.cpp` says why."""

from array import array
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.models.native.layers import function


def likeliest(scores: Tensor, k: int, scale: float) -> list[list[tuple[int, float]]] | None:
    """The k highest scores of each row of `[rows, n]`, each with its share in the softmax of `scale` times the scores.

    The first among equals is first, and what is no number comes before all numbers, with a chance of 0. None for other
    scores than float32 side by side on the CPU.
    """
    if scores.dtype != torch.float32 or not scores.is_cpu or not scores.is_contiguous():
        return None
    rows, count = scores.shape
    k = min(k, count)
    places, chances = array("q", bytes(8 * rows * k)), array("d", bytes(8 * rows * k))
    (at_places, _), (at_chances, _) = places.buffer_info(), chances.buffer_info()
    _likeliest()(scores.data_ptr(), rows, count, k, scale, at_places, at_chances)
    found = list(zip(places, chances, strict=True))
    return [found[row * k : (row + 1) * k] for row in range(rows)]


@cache
def _likeliest() -> Any:
    return function("ppd_likeliest")
