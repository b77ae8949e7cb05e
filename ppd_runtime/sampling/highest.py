"""Finds the highest scores, the first among equals, and whether a token may be chosen by them.

The searches are NumPy's on CPUs: between two passes the caches are cold, so little code saves time. There, asking for a
device's type and entering inference mode take ten microseconds each. NumPy and PyTorch rank NaN above all numbers. So
the highest score alone tells whether a token can be chosen: it is finite, unless a score is NaN or infinitely high, or
all are infinitely low.
"""

import math

import torch
from torch import Tensor

NO_TOKEN = -1
"""Replaces a choice if a score is NaN or infinitely high, or all are infinitely low."""


def first_highest(scores: Tensor) -> int:
    """Where `[n]` scores are highest."""
    return int((scores.numpy() if scores.is_cpu else scores).argmax())


def choice(scores: Tensor) -> int:
    """Like `first_highest`, or NO_TOKEN."""
    if not scores.is_cpu:
        return choices(scores[None])[0]
    numbers = scores.numpy()
    token = int(numbers.argmax())
    return token if math.isfinite(numbers[token]) else NO_TOKEN


def choices(scores: Tensor) -> list[int]:
    """The `choice` of each row of `[rows, n]` scores."""
    if not scores.is_cpu:  # there each look at a number waits
        return choices_there(scores).tolist()
    rows = scores.numpy()
    tokens = rows.argmax(-1)
    return [int(token) if math.isfinite(row[token]) else NO_TOKEN for row, token in zip(rows, tokens, strict=True)]


def choices_there(scores: Tensor) -> Tensor:
    """The `choices`, on the scores' device."""
    places = scores.argmax(-1)
    return torch.where(scores.gather(-1, places[:, None])[:, 0].isfinite(), places, NO_TOKEN)


def best(scores: Tensor, k: int) -> list[int]:
    """The k highest of `[n]` scores; the first is `argmax`'s among equals (`topk`'s may differ)."""
    if not scores.is_cpu:
        return best_of_each(scores[None], k)[0]
    first = first_highest(scores)
    if k == 1:
        return [first]
    return [first, *(token for token in scores.topk(k).indices.tolist() if token != first)][:k]


def best_of_each(scores: Tensor, k: int) -> list[list[int]]:
    """The `best` of each row of `[rows, n]` scores."""
    if not scores.is_cpu:
        return [_first_of(row, k) for row in _first_and_best(scores, k).tolist()]
    firsts = scores.numpy().argmax(-1).tolist()
    if k == 1:
        return [[first] for first in firsts]
    rows = zip(firsts, scores.topk(k).indices.tolist(), strict=True)
    return [[first, *(token for token in best if token != first)][:k] for first, best in rows]


def best_with_values(scores: Tensor, values: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `best` of each row of `[rows, n]` scores, and what `values`, `[rows, n]`, has there."""
    if scores.is_cpu:
        named = best_of_each(scores, k)
        return named, values.gather(1, torch.tensor(named)).tolist()
    return named_with_values(first_and_values(scores, values, k).tolist(), k)


def first_and_values(scores: Tensor, values: Tensor, k: int) -> Tensor:
    """`[rows, 2, 1 + k]`: `_first_and_best`, and the values there; double has each place exactly."""
    places = _first_and_best(scores, k)
    return torch.stack([places.double(), values.gather(1, places).double()], dim=1)


def named_with_values(rows: list[list[list[float]]], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """`best_with_values` from rows of `first_and_values`."""
    named = [_first_of([int(place) for place in row], k) for row, _ in rows]
    found = [dict(zip(map(int, row), of_row, strict=True)) for row, of_row in rows]
    return named, [[of_row[place] for place in row] for row, of_row in zip(named, found, strict=True)]


def with_chances(named: list[list[int]], chances: list[list[float]]) -> list[list[tuple[int, float]]]:
    """Each row's tokens with their chances; 0 if scores are NaN."""
    numbers = ([chance if chance > 0 else 0.0 for chance in row] for row in chances)
    return [list(zip(*row, strict=True)) for row in zip(named, numbers, strict=True)]


def _first_and_best(scores: Tensor, k: int) -> Tensor:
    """`[rows, 1 + k]`: where a row is highest, and its k highest places, on the scores' device."""
    return torch.cat([scores.argmax(-1, keepdim=True), scores.topk(k).indices], dim=-1)


def _first_of(row: list[int], k: int) -> list[int]:
    """The first k of a row of `_first_and_best`, each once."""
    first, *others = row
    return [first, *(place for place in others if place != first)][:k]
