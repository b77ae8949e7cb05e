"""Rotary embeddings from a table, so that a pass over few tokens computes no sines."""

import contextlib
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor, nn

from ppd_runtime.models.stage.behaviour import table_borders

_POSITIONS_AT_ONCE = 256
_FEW_TOKENS = 16
_CHANGING = {"dynamic", "longrope"}  # kinds whose frequencies depend on the length of the text
_Embedded = tuple[Tensor, Tensor]


class RotaryTable(nn.Module):
    """A decoder's own rotary embedding, asked once for many positions; passes over few tokens get parts of its answer.

    Where it takes another table for long texts, as long-RoPE does, the longest position of a pass decides for all of
    its tokens: `borders` are where that changes. On GPUs every pass asks the embedding itself.

    Args:
        rotary: the decoder's.
        most_positions: positions that the model has; None where it names no end.
    """

    def __init__(self, rotary: nn.Module, most_positions: int | None = None) -> None:
        super().__init__()
        self._rotary = [rotary]  # in a list: it is the model's, not a part of this module
        borders = _borders(rotary, most_positions)
        self.borders = borders or ()
        self.knows_borders = borders is not None
        self._tables = self.knows_borders
        self._most_positions = most_positions
        self._blocks: dict[tuple[Any, ...], _Embedded] = {}

    def most_together(self, position: int) -> int | None:
        """How many tokens from `position` on a pass may have that are embedded as passes of their own would embed them;
        None: any number."""
        ahead = [border for border in self.borders if border > position]
        return ahead[0] - position if ahead else None

    def forward(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Embedded:
        """Cosines and sines, `[1, tokens, head_dim]` each, for `position_ids`, `[1, tokens]`."""
        found = None
        if self._tables and position_ids.is_cpu and position_ids.dim() == 2 and position_ids.shape[0] == 1:
            found = self._looked_up(hidden, position_ids, *kind, **named)
        return self._rotary[0](hidden, position_ids, *kind, **named) if found is None else found

    def _looked_up(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Embedded | None:
        """From a block of the table, where all positions are in one; else None."""
        if position_ids.shape[1] > _FEW_TOKENS:
            return None
        positions = position_ids[0].tolist()
        first, end = self._block(positions[0])
        if not all(first <= position < end for position in positions):
            return None
        key = (first, hidden.dtype, *kind, *named.values())
        if key not in self._blocks:
            answer = self._rotary[0](hidden, torch.arange(first, end)[None], *kind, **named)
            if not isinstance(answer, tuple):  # one tensor of complex numbers
                self._tables = False
                return None
            self._blocks[key] = answer
        cosines, sines = self._blocks[key]
        row = positions[0] - first
        if positions == list(range(positions[0], positions[0] + len(positions))):
            return cosines[:, row : row + len(positions)], sines[:, row : row + len(positions)]
        rows = position_ids[0] - first
        return cosines[:, rows], sines[:, rows]

    def _block(self, position: int) -> tuple[int, int]:
        """The first position of those that are asked for together with this one, and the first behind them."""
        first = position - position % _POSITIONS_AT_ONCE
        end = min(first + _POSITIONS_AT_ONCE, self._most_positions or first + _POSITIONS_AT_ONCE)
        ahead = bisect_right(self.borders, position)
        if ahead:
            first = max(first, self.borders[ahead - 1])
        return first, min([end, *self.borders[ahead : ahead + 1]])


def _borders(rotary: nn.Module, most_positions: int | None) -> tuple[int, ...] | None:
    """None where there is no telling: without an end, or for odd embeddings that ask for more than positions."""
    if most_positions is not None:
        with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return table_borders(rotary, most_positions)
    kinds = getattr(rotary, "rope_type", "default")
    return None if _CHANGING & set(kinds.values() if isinstance(kinds, dict) else [kinds]) else ()
