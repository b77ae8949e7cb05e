"""A drafter's passes over a few tokens, and the likeliest of some logits; `drafter.cpp` says how they are computed."""

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.linear import QuantisedLinear

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ppd_drafter_tokens": (ctypes.c_int, [_P, _P]),
    "ppd_drafter_logits": (ctypes.c_int, [_P, _P, _N, _P]),
    "ppd_likeliest": (None, [_P, _N, _N, _F, _P, _P]),
}
LAYERS = ("mix", "query_key_value", "out", "gate_up", "down")
"""A drafter's layers, in the order of `Network` in `drafter.cpp`."""


class _Weight(ctypes.Structure):
    _fields_ = (("packed", _P), ("num_bytes", _N), ("bias", _P))


class _Network(ctypes.Structure):
    _fields_ = (
        *((name, _Weight) for name in (*LAYERS, "head")),
        ("norm", _P),
        ("epsilon", ctypes.c_double),
        *((name, _N) for name in ("size", "heads", "inner", "shortlist", "capacity")),
        *((name, _P) for name in ("keys", "values", "states", "cos", "sin")),
    )


class _Tokens(ctypes.Structure):
    _fields_ = (
        *((name, _N) for name in ("count", "depth")),
        *((name, _P) for name in ("embedded", "before", "parents", "places", "rows", "seen", "paths")),
    )


class ScaledNorm(NamedTuple):
    """A norm that divides states by their root mean square."""

    weight: Tensor
    """`[size]` in float32."""
    epsilon: float


class Where(NamedTuple):
    """Where tokens of one pass stand, for each token; see `Tokens` in `drafter.cpp`."""

    places: Sequence[int]
    """Positions, from which the rotary angles come."""
    rows: Sequence[int]
    """Rows for their entries and states."""
    seen: Sequence[int]
    """How many of the first rows each sees."""
    paths: Sequence[Sequence[int]]
    """Further rows that each sees, as many for each; the last one is its own."""


class DrafterPasses:
    """A drafter's passes over one sequence, in memory of the caller.

    Args:
        layers: by names of `LAYERS`.
        head: over the shortlist, if its logits are wanted, with the norm before it.
        entries: keys and values, `[2, heads, rows, head_dim]` in float32.
        states: `[rows, size]` in float32.
        rotary: cosines and sines, `[rows, head_dim / 2]` in float32.
    """

    def __init__(
        self,
        layers: Mapping[str, QuantisedLinear],
        head: tuple[ScaledNorm, QuantisedLinear] | None,
        entries: Tensor,
        states: Tensor,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        self._kept = layers, head, entries, states, rotary
        network = _Network(capacity=len(states), size=states.shape[1], heads=entries.shape[1])
        network.inner, self.shortlist = layers["down"].in_features, head[1].out_features if head else 0
        for name, layer in layers.items():
            setattr(network, name, _weight(layer))
        if head:
            network.norm, network.epsilon = head[0].weight.data_ptr(), head[0].epsilon
            network.head, network.shortlist = _weight(head[1]), self.shortlist
        network.keys, network.values, network.states = entries[0].data_ptr(), entries[1].data_ptr(), states.data_ptr()
        network.cos, network.sin = (part.data_ptr() for part in rotary)
        self._network, self._at = network, ctypes.addressof(network)

    def run(self, embedded: Tensor, before: Tensor | Sequence[int], where: Where) -> None:
        """Compute entries and states of tokens.

        Args:
            embedded: `[tokens, size]` in float32, contiguous.
            before: the states before them, like `embedded`, or in which rows these are.
        """
        given = isinstance(before, Tensor)
        numbers = [array("q", some) for some in (() if given else before, where.places, where.rows, where.seen)]
        numbers.append(array("q", [row for path in where.paths for row in path]))
        depth = len(where.paths[0]) if where.paths else 0
        before_at = before.data_ptr() if isinstance(before, Tensor) else None
        at = (some.buffer_info()[0] for some in numbers)
        tokens = _Tokens(len(where.rows), depth, embedded.data_ptr(), before_at, *at)
        if failed := function("ppd_drafter_tokens")(self._at, ctypes.addressof(tokens)):
            raise RuntimeError(f"drafter: native code failed ({failed}) over {len(where.rows)} tokens")

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Logits of the states in some rows, `[len(rows), shortlist]`; only with a head."""
        numbers, result = array("q", rows), torch.empty(len(rows), self.shortlist)
        if failed := function("ppd_drafter_logits")(self._at, numbers.buffer_info()[0], len(rows), result.data_ptr()):
            raise RuntimeError(f"drafter: native code failed ({failed}) for the logits of {len(rows)} states")
        return result


def likeliest(scores: Tensor, k: int, scale: float) -> list[list[tuple[int, float]]]:
    """For each row of scores `[rows, n]`, in float32 on the CPU: where its k highest are, the first among equals, each
    with its share of the softmax of `scale` times the row, which is 0 if a score is NaN or the highest is infinite.

    Raises:
        ValueError: if k is not from 1 to n.
    """
    if not 0 < k <= scores.shape[-1]:
        raise ValueError(f"the {k} likeliest of {scores.shape[-1]}: there are as many at the most, and at least one")
    scores, find = scores.contiguous(), function("ppd_likeliest")
    (rows, count), at, found = scores.shape, scores.data_ptr(), []
    for row in range(rows):
        places, chances = array("q", bytes(8 * k)), array("d", bytes(8 * k))
        find(at + 4 * row * count, count, k, scale, places.buffer_info()[0], chances.buffer_info()[0])
        found.append([*zip(places, chances, strict=True)])
    return found


@cache
def function(name: str) -> Any:
    """A function of `drafter.cpp`, with its signature."""
    found = getattr(load(), name)
    found.restype, found.argtypes = _SIGNATURES[name]
    return found


def _weight(layer: QuantisedLinear) -> _Weight:
    bias = None if layer.bias is None else layer.bias.data_ptr()
    return _Weight(layer.weight.data_ptr(), layer.weight.numel(), bias)
