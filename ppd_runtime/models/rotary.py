"""Rotary embeddings from a table, so that a pass over few tokens computes no sines."""

from typing import Any

import torch
from torch import Tensor, nn

_POSITIONS_AT_ONCE = 256
_FEW_TOKENS = 16
_CHANGING = {"dynamic", "longrope"}  # their frequencies depend on the length of the text


class RotaryTable(nn.Module):
    """A decoder's own rotary embedding, asked once for many positions; passes over few tokens get parts of its answer.

    On GPUs, and where frequencies change with the text, every pass asks the embedding itself.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = [rotary]  # in a list: it is the model's, not a part of this module
        kinds = getattr(rotary, "rope_type", "default")
        self._fixed = not _CHANGING & set(kinds.values() if isinstance(kinds, dict) else [kinds])
        self._blocks: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, hidden: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines, `[1, tokens, head_dim]` each, for `position_ids`, `[1, tokens]`."""
        one_text = position_ids.dim() == 2 and position_ids.shape[0] == 1
        if not one_text or position_ids.shape[1] > _FEW_TOKENS or not self._fixed or not position_ids.is_cpu:
            return self._rotary[0](hidden, position_ids, *kind, **named)
        positions = position_ids[0].tolist()
        block, row = divmod(positions[0], _POSITIONS_AT_ONCE)
        if any(position // _POSITIONS_AT_ONCE != block for position in positions):
            return self._rotary[0](hidden, position_ids, *kind, **named)
        key = (block, hidden.dtype, *kind, *named.values())
        if key not in self._blocks:
            first = block * _POSITIONS_AT_ONCE
            in_block = torch.arange(first, first + _POSITIONS_AT_ONCE)[None]
            answer = self._rotary[0](hidden, in_block, *kind, **named)
            if not isinstance(answer, tuple):  # one tensor of complex numbers
                self._fixed = False
                return self._rotary[0](hidden, position_ids, *kind, **named)
            self._blocks[key] = answer
        cosines, sines = self._blocks[key]
        if positions == list(range(positions[0], positions[0] + len(positions))):
            return cosines[:, row : row + len(positions)], sines[:, row : row + len(positions)]
        rows = position_ids[0] - block * _POSITIONS_AT_ONCE
        return cosines[:, rows], sines[:, rows]
