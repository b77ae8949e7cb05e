"""Rotary embeddings from a table, so that a pass over few tokens computes no sines."""

import contextlib
import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppd_runtime.models.stage.decoder_parts import shallow_copy
from ppd_runtime.models.stage.library_probe import table_borders

_POSITIONS_AT_ONCE = 256
_FEW_TOKENS = 16
_DYNAMIC = "dynamic"
_CHANGING = {_DYNAMIC, "longrope"}  # kinds whose frequencies depend on the length of the text
_EXTENDING = {_DYNAMIC, "linear", "yarn"}  # kinds that make a model's length a multiple of the one it had
_ORIGINAL = "original_max_position_embeddings"
_Embedded = tuple[Tensor, Tensor]


def most_positions(config: PretrainedConfig) -> int | None:
    """Positions that a model has; None if its configuration names no end.

    A scaled rotary embedding may extend the original length. If the configuration names that one, as model cards tell
    people to write it, the result is the scale's multiple of it. If it names the extended length, it says so: by the
    original one beside it, or by other kinds of layers that reach it unscaled.
    """
    named = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rotary.values() if isinstance(kind, Mapping)] or [rotary]
    scaled = [kind for kind in kinds if kind.get("rope_type") in _EXTENDING]
    if not named or not scaled:
        return named
    unnamed = named if len(scaled) == len(kinds) else 0
    beside = getattr(config, _ORIGINAL, None)  # the library takes this one first, too
    extended = [_scale(kind) * (beside or kind.get(_ORIGINAL) or unnamed) for kind in scaled]
    return max(named, int(min(extended)))


def _scale(kind: Mapping[str, Any]) -> float:
    factor = kind.get("factor")
    return factor if isinstance(factor, int | float) and math.isfinite(factor) else 1.0


class RotaryTable(nn.Module):
    """A decoder's own rotary embedding, computed once for many positions; passes over few tokens get parts of it.

    If it has another table for long texts, as long-RoPE has, a pass's longest position decides for all its tokens: the
    table changes at `borders`. Dynamic scaling makes a table for each length beyond the original one, from
    `changes_from` on. On GPUs every pass asks the embedding itself.

    Args:
        rotary: the decoder's.
        most_positions: positions that the model has; None if it names no end.
    """

    def __init__(self, rotary: nn.Module, most_positions: int | None = None) -> None:
        super().__init__()
        self._rotary = [rotary]  # in a list: it is the model's, not a part of this module
        self.changes_from = cast("int", rotary.original_max_seq_len) if _DYNAMIC in _kinds(rotary) else None
        borders = _borders(rotary, self.changes_from or most_positions)
        self.borders = borders or ()
        self.knows_borders = borders is not None
        self._tables = self.knows_borders
        self._most_positions = most_positions
        self._blocks: dict[tuple[Any, ...], _Embedded] = {}

    def __getattr__(self, name: str) -> Any:
        """What a decoder asks its rotary embedding besides."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_rotary" not in self.__dict__:
                raise
            return getattr(self._rotary[0], name)

    def most_together(self, position: int) -> int | None:
        """The most tokens from `position` on in one pass that are embedded as in passes of their own; None: any."""
        border = self._border_behind(position)
        return None if border is None else border - position

    def _border_behind(self, position: int) -> int | None:
        """The first position behind this one whose passes take another table; None: there is none."""
        if self.changes_from is not None and position >= self.changes_from:
            return position + 1
        ahead = bisect_right(self.borders, position)
        return self.borders[ahead] if ahead < len(self.borders) else self.changes_from

    def forward(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Embedded:
        """Cosines and sines, `[1, tokens, head_dim]` each, for `position_ids`, `[1, tokens]`."""
        found = None
        if self._tables and position_ids.is_cpu and position_ids.dim() == 2 and position_ids.shape[0] == 1:
            found = self._looked_up(hidden, position_ids, *kind, **named)
        return self._asked(hidden, position_ids, *kind, **named) if found is None else found

    def _asked(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> Any:
        """The embedding's output; a dynamic one runs without its memory of earlier texts."""
        rotary = self._rotary[0]
        if self.changes_from is not None:
            rotary = shallow_copy(rotary)
            rotary._buffers = dict(rotary._buffers)
        return rotary(hidden, position_ids, *kind, **named)

    def _looked_up(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Embedded | None:
        """Look up in the table, of few tokens; None across a border, where the longest position decides for all."""
        if position_ids.shape[1] > _FEW_TOKENS:
            return None
        positions = position_ids[0].tolist()
        if self.changes_from is not None and max(positions) >= self.changes_from:
            return None  # nobody else asks for it
        first, end = self._block(positions[0])
        if not all(first <= position < end for position in positions):
            return self._from_blocks(hidden, position_ids, *kind, **named) if len(positions) > 1 else None
        key = (first, hidden.dtype, *kind, *named.values())
        if key not in self._blocks:
            answer = self._asked(hidden, torch.arange(first, end)[None], *kind, **named)
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

    def _from_blocks(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> _Embedded | None:
        """Look up each token in a block of its own."""
        if len({self._border_behind(position) for position in position_ids[0].tolist()}) > 1:
            return None
        found = [self._looked_up(hidden, one, *kind, **named) for one in position_ids.split(1, dim=1)]
        if any(one is None for one in found):
            return None
        cosines, sines = (torch.cat(parts, dim=1) for parts in zip(*cast("list[_Embedded]", found), strict=True))
        return cosines, sines

    def _block(self, position: int) -> tuple[int, int]:
        """The half-open range of positions that are computed together with this one."""
        first = position - position % _POSITIONS_AT_ONCE
        end = min(first + _POSITIONS_AT_ONCE, self._most_positions or first + _POSITIONS_AT_ONCE)
        if ahead := bisect_right(self.borders, position):
            first = max(first, self.borders[ahead - 1])
        return first, min(end, self._border_behind(position) or end)


def _borders(rotary: nn.Module, most_positions: int | None) -> tuple[int, ...] | None:
    """Positions where tables begin to differ; None if that is unknown: without an end, or for unusual embeddings."""
    if most_positions is not None:
        with contextlib.suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return table_borders(rotary, most_positions)
    return None if _CHANGING & _kinds(rotary) else ()


def _kinds(rotary: nn.Module) -> set[str]:
    kinds = getattr(rotary, "rope_type", "default")
    return set(kinds.values() if isinstance(kinds, dict) else [kinds])
