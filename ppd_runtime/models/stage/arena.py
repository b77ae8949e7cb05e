"""Rows for the entries of several sequences side by side, so that tokens of several run in one pass."""

import logging
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import LayersMemory, StageCache, whole_rows

logger = logging.getLogger(__name__)
_SEQUENCES = 16  # room in multiples of the first one's size, if no number of tokens is given
_SPARE = 256  # rows of each beside its text: for tokens in flight, and up to the end of what a pass attends to
_KEPT_BYTES = 2**28
"""Of used rows, kept while no sequence has any: the next one's large pages would be cleared first."""
_NOT_RESERVED = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000} if hasattr(mmap, "MADV_HUGEPAGE") else {}
"""Linux's MAP_NORESERVE: unused memory is not reserved."""


class RowArena:
    """Rows of a stage's layers, in float32 on a CPU. Each sequence has consecutive ones.

    Args:
        windows: each layer's, as in `StageCache`.
        first: the stage's first layer.
        room: tokens of all sequences at a time; None: sixteen times as many as the first one has.
        moves: as in `StageCache`, of each sequence.
    """

    def __init__(self, windows: Sequence[int | None], first: int, room: int | None = None, moves: bool = True) -> None:
        self._windows, self._first_layer, self._room, self._moves = list(windows), first, room, moves
        self._taken: list[range] = []
        self.is_refused = False
        """Whether the system refused so much memory: then each sequence has its own."""
        self._forget(0)

    def _rows_for(self, size: int) -> int:
        """Rows of an arena whose first sequence has `size` rows."""
        return max(size, _SEQUENCES * (size if self._room is None else _SPARE) + (self._room or 0))

    def _forget(self, rows: int) -> None:
        memory = _UntouchedMemory(len(self._windows) - self._first_layer)
        self.cache = StageCache(self._windows, rows, self._first_layer, memory)
        """All rows, as one cache; it counts no tokens."""
        self._reach = 0
        """Rows that have been used."""

    def take(self, tokens: int) -> "ArenaCache | None":
        """A cache for a sequence of `tokens` tokens; None without room beside the others."""
        size = whole_rows(tokens)
        if self.is_refused:
            return None
        if not self._taken and self.cache.capacity < (rows := self._rows_for(size)):
            self._forget(rows)
        start = 0
        for place, taken in enumerate([*self._taken, range(self.cache.capacity, self.cache.capacity)]):
            if taken.start - start >= size:
                ours = range(start, start + size)
                self._taken.insert(place, ours)
                return ArenaCache(self, self._windows, tokens, self._first_layer, ours, self._moves)
            start = taken.stop
        return None

    @torch.inference_mode()
    def give_back(self, rows: range, used: int) -> None:
        """Free a sequence's rows, of which it used the first `used`.

        They are zeroed: non-finite numbers must not reach another sequence.
        """
        self._taken.remove(rows)
        used_rows = slice(rows.start, min(rows.start + used, rows.stop))
        self._reach = max(self._reach, used_rows.stop)
        parts = [part for layer in self.cache.layers for part in layer.rows]
        if not self._taken and sum(part[: self._reach].nbytes for part in parts) > _KEPT_BYTES:
            self._forget(0)
            return
        for part in parts:
            part[used_rows].zero_()

    def part(self, index: int, rows: range, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Like `LayersMemory.part`: a sequence's rows of a layer with entries like `keys` and `values`."""
        layer = self.cache.layers[self._first_layer + index]
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        ours = slice(rows.start, rows.stop)
        return layer.rows[0][ours], layer.rows[1][ours]


class ArenaCache(StageCache):
    """The cache of a sequence whose rows are an arena's."""

    def __init__(
        self,
        arena: RowArena,
        windows: Sequence[int | None],
        capacity: int,
        first: int,
        rows: range,
        moves: bool,
    ) -> None:
        super().__init__(windows, capacity, first, _ArenaPart(arena, rows, len(windows) - first), moves)
        self.arena, self.rows = arena, rows

    @property
    def is_there(self) -> bool:
        """Whether its rows are among the arena's."""
        return not self.arena.is_refused


class _UntouchedMemory(LayersMemory):
    """Page-aligned memory that takes no room until it is written to.

    Passes over rows that cross CPU cache lines take 4 to 6 % longer.
    """

    def _zeros(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        count = math.prod(shape)
        memory = mmap.mmap(-1, max(4 * count, 1), **_NOT_RESERVED)
        if _NOT_RESERVED:
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32, count=count).view(tuple(shape))


class _ArenaPart(LayersMemory):
    def __init__(self, arena: RowArena, rows: range, num_layers: int) -> None:
        super().__init__(num_layers)
        self._arena, self._rows = arena, rows

    def part(self, index: int, size: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._arena.is_refused:
            return super().part(index, size, keys, values)
        try:
            found = self._arena.part(index, self._rows, keys, values)
        except OSError as error:
            logger.warning("requests run one by one, for the system gives no memory that they share: %s", error)
            self._arena.is_refused = True
            return super().part(index, size, keys, values)
        of_all = self._arena.cache.memory.whole
        self.whole = None if of_all is None else of_all[:, :, self._rows.start : self._rows.stop]
        return found
