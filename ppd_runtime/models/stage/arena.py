"""Rows for the entries of several sequences side by side, so that tokens of several run in one pass."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import LayersMemory, StageCache, whole_rows

_SEQUENCES = 16  # of the first one's size that there is room for; what none has used is no memory


class RowArena:
    """Rows of a stage's layers, of which each sequence has some that follow each other; in float32, on a CPU.

    Args:
        windows: each layer's, as `StageCache` takes them.
        first: the stage's first layer.
    """

    def __init__(self, windows: Sequence[int | None], first: int) -> None:
        self._windows, self._first_layer = list(windows), first
        self._taken: list[range] = []
        self._forget(0)

    def _forget(self, rows: int) -> None:
        memory = _UntouchedMemory(len(self._windows) - self._first_layer)
        self.cache = StageCache(self._windows, rows, self._first_layer, memory)
        """All rows, as one cache; it counts no tokens."""

    def take(self, tokens: int) -> "ArenaCache | None":
        """A cache for a sequence of so many tokens; None where they have no room beside the others."""
        size = whole_rows(tokens)
        if not self._taken and self.cache.capacity < size:
            self._forget(_SEQUENCES * size)
        start = 0
        for place, taken in enumerate([*self._taken, range(self.cache.capacity, self.cache.capacity)]):
            if taken.start - start >= size:
                rows = range(start, start + size)
                self._taken.insert(place, rows)
                return ArenaCache(self, self._windows, tokens, self._first_layer, rows)
            start = taken.stop
        return None

    @torch.inference_mode()
    def give_back(self, rows: range, used: int) -> None:
        """A sequence is over that has used the first so many of its rows.

        They are emptied: numbers that are not finite are no other sequence's business.
        """
        self._taken.remove(rows)
        if not self._taken:
            self._forget(0)
            return
        for of_layer in (part for layer in self.cache.layers for part in layer.rows):
            of_layer[rows.start : min(rows.start + used, rows.stop)].zero_()

    def part(self, index: int, rows: range, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A sequence's rows of a layer whose entries look like `keys` and `values`, as `LayersMemory.part`."""
        layer = self.cache.layers[self._first_layer + index]
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        ours = slice(rows.start, rows.stop)
        return layer.rows[0][ours], layer.rows[1][ours]


class ArenaCache(StageCache):
    """The cache of a sequence whose rows are an arena's."""

    def __init__(self, arena: RowArena, windows: Sequence[int | None], capacity: int, first: int, rows: range) -> None:
        super().__init__(windows, capacity, first, _ArenaPart(arena, rows, len(windows) - first))
        self.arena, self.rows = arena, rows


class _UntouchedMemory(LayersMemory):
    """Memory that is none until something is written to it."""

    def _zeros(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.zeros(shape, np.float32))


class _ArenaPart(LayersMemory):
    def __init__(self, arena: RowArena, rows: range, num_layers: int) -> None:
        super().__init__(num_layers)
        self._arena, self._rows = arena, rows

    def part(self, index: int, size: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = self._arena.part(index, self._rows, keys, values)
        of_all = self._arena.cache.memory.whole
        self.whole = None if of_all is None else of_all[:, :, self._rows.start : self._rows.stop]
        return found
