"""Decoder layers with a sub-layer left out: what remains is the library's own layer, residual stream and norms."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.behaviour import embedding_scale, shallow_copy
from ppd_runtime.models.stage.stage import Piece, Stage, decoder_of


@dataclass(frozen=True)
class LayerSet:
    """Sub-layers to leave out, by the numbers of their layers, which count from 0, in ascending order."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


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


def check_sub_layers(skeleton: PreTrainedModel) -> None:
    """Raise ValueError where a layer is not an attention and an MLP that can be left out one by one.

    `skeleton` may be on the meta device.
    """
    states = torch.zeros(1, 1, skeleton.config.hidden_size, device=skeleton.device, dtype=skeleton.dtype)
    scale = embedding_scale(skeleton)
    for number, layer in enumerate(skeleton.model.layers):
        for left_out in ("attention", "mlp"):
            if not hasattr(layer, {"attention": "self_attn", "mlp": "mlp"}[left_out]):
                raise ValueError(f"layer {number + 1} has no {left_out} of its own to leave out")
            piece = decoder_of(skeleton, {number: without(layer, **{left_out: True})}, scale)
            try:
                with torch.inference_mode(), contextlib.suppress(NotImplementedError, RuntimeError):
                    piece(inputs_embeds=states, use_cache=False)  # without numbers experts cannot be chosen
            except (TypeError, ValueError) as error:
                raise ValueError(f"layer {number + 1} does not run without its {left_out} ({error})") from error


def sparse_piece(stage: Stage, left_out: LayerSet) -> Piece:
    """A stage's model without some sub-layers, over the stage's own caches; at least one attention must stay.

    Of a layer without attention and MLP nothing is left: it is not run.
    """
    layers = {}
    for number, layer in enumerate(stage.model.model.layers):
        attention, mlp = number in left_out.attention, number in left_out.mlp
        if not (attention and mlp):
            layers[number] = without(layer, attention=attention, mlp=mlp) if attention or mlp else layer
    attending = tuple(number for number in layers if number not in left_out.attention)
    return stage.piece(layers, attending, tuple(number for number in layers if number in left_out.mlp))


def share_run(model: PreTrainedModel, left_out: LayerSet) -> float:
    """Parameters of the attentions and MLPs that stay, as a share of all of them."""
    sizes = [(_size(layer.self_attn), _size(layer.mlp)) for layer in model.model.layers]
    whole = sum(attention + mlp for attention, mlp in sizes)
    missing = sum(sizes[i][0] for i in left_out.attention) + sum(sizes[i][1] for i in left_out.mlp)
    return 1 - missing / whole


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
