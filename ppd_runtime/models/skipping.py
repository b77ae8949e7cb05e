"""Decoder layers with a sub-layer left out: what remains is the library's own layer, residual stream and norms."""

from typing import Any

import torch
from torch import Tensor, nn

from ppd_runtime.models.stage import shallow_copy


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def without(layer: nn.Module, *, attention: bool = False, mlp: bool = False) -> nn.Module:
    """The layer with its attention, its MLP, or both adding nothing; weights are shared.

    Without attention it neither reads nor writes key/value entries.
    """
    twin = shallow_copy(layer)
    if attention:
        twin.self_attn = _NoAttention()
    if mlp:
        twin.mlp = _NoMLP()
    return twin
