"""Which cache row each position of a sequence lies in: kept tokens of a tree stay in their rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_FIRST_POSITIONS = 1024


class RowOrder:
    """The rows of a sequence by position; at first position i lies in row i.

    Positions without a token name free rows. So the list stays a permutation of all rows.
    """

    def __init__(self) -> None:
        self._displaced: set[int] = set()  # positions that lie elsewhere than in their own rows
        self.extent = 0
        """Rows up to the last one that has been another position's."""
        self._take(np.arange(_FIRST_POSITIONS, dtype=np.int64))

    def _take(self, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        self._rows, self._at = rows, rows.ctypes.data

    def address(self, positions: int) -> int:
        """The address of the rows of the first `positions` positions, as int64."""
        if positions > len(self._rows):
            more = np.arange(len(self._rows), max(positions, 2 * len(self._rows)), dtype=np.int64)
            self._take(np.concatenate([self._rows, more]))
        return self._at

    def exchange(self, position: int, other: int) -> None:
        """Exchange the rows of two positions."""
        self.address(1 + max(position, other))
        rows = self._rows
        rows[position], rows[other] = rows[other], rows[position]
        self._note(position, other)

    def keep(self, position: int, nodes: Sequence[int]) -> None:
        """Make the rows at `nodes` (ascending) after `position` consecutive positions from there on."""
        end = 1 + position + nodes[-1]
        self.address(end)
        kept = [position + node for node in nodes]
        order = kept + sorted(set(range(position, end)).difference(kept))
        self._rows[position:end] = self._rows[order]
        self._note(*range(position, end))

    def rows(self, first: int, end: int) -> slice | Tensor:
        """Index of the rows of positions `first` to `end`; where possible a slice, whose tensors are views."""
        if not self._displaced or self._displaced.isdisjoint(range(first, end)):
            return slice(first, end)
        self.address(end)
        return torch.from_numpy(self._rows[first:end].copy())

    def _note(self, *positions: int) -> None:
        self.extent = max(self.extent, 1 + max(positions))
        for position in positions:
            (self._displaced.discard if self._rows[position] == position else self._displaced.add)(position)
