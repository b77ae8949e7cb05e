"""Kangaroo's adapter: a norm, one attention, a norm, then the target's own head, after a shallow exit of the target.

It is a model of the library with one layer, so that a `LayerRange` runs it, with a key/value cache of its own:
`stage = LayerRange(load_adapter(adapter, model))`, `stage.begin(capacity)`, then for the states after the exit layer
`stage.logits(stage.run(0, 1, states, position))`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.native.linear import with_floats
from ppd_runtime.models.stage.decoder_parts import embedding_name, final_norm, shallow_copy
from ppd_runtime.models.stage.slicing import layer_range, without
from ppd_runtime.models.trained.parts import PartInfo, describe_part, save_part


@dataclass(frozen=True)
class AdapterInfo(PartInfo):
    """What an adapter was trained for; `describe_adapter` reads it from the adapter's folder."""

    NAME: ClassVar[str] = "adapter"
    NOUN: ClassVar[str] = "adapter"
    COMMAND: ClassVar[str] = "ppd train adapter"


def new_adapter(model: PreTrainedModel, exit_layer: int) -> PreTrainedModel:
    """An untrained adapter for the states behind `exit_layer` (1 to d-1) of a whole model.

    Its attention and norms begin as float32 copies of the model's next layer's, with the same window, and of the final
    norm. Head and rotary tables are the model's own. It has no embedding and no MLP; norms that only fed or followed
    the MLP are left out.
    """
    decoder = layer_range(model, exit_layer, exit_layer + 1)
    layer = with_floats(copy.deepcopy(without(model.model.layers[exit_layer], mlp=True))).float().requires_grad_(True)
    number_layer(layer, 0)
    decoder.layers = nn.ModuleList([layer])
    norm = final_norm(model.model)
    setattr(decoder, norm, copy.deepcopy(getattr(model.model, norm)).float().requires_grad_(True))
    setattr(decoder, embedding_name(decoder), nn.Identity())
    adapter = shallow_copy(model)
    adapter.model, adapter.config = decoder, decoder.config
    _drop_idle_norms(adapter)
    return adapter


def save_adapter(
    folder: Path, adapter: PreTrainedModel, known: AdapterInfo, training: Mapping[str, Any]
) -> AdapterInfo:
    """Write an adapter's folder, without the head that it shares; see `save_part`."""
    return save_part(folder, adapter.model.state_dict(), known, training)


def describe_adapter(folder: str | Path, info: ModelInfo) -> AdapterInfo:
    """Read what a folder's adapter was trained for and check that it was this model; see `describe_part`."""
    return describe_part(AdapterInfo, folder, info)


def load_adapter(adapter: AdapterInfo, model: PreTrainedModel) -> PreTrainedModel:
    """The adapter as a model of one layer behind `model`, which is whole, with its dtype, on its device."""
    network = new_adapter(model, adapter.exit_layer)
    network.model.load_state_dict(adapter.tensors())
    for learned in (network.model.layers, getattr(network.model, final_norm(network.model))):
        learned.to(model.dtype).requires_grad_(False).eval()
    return network


def number_layer(layer: nn.Module, index: int) -> None:
    """Tell the layer's modules which layer of a cache is theirs."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, "layer_idx", index)  # noqa: B010 (a number, where modules hold tensors)


def _drop_idle_norms(adapter: PreTrainedModel) -> None:
    """Remove modules that no output depends on: they have no gradient."""
    (layer,), device = adapter.model.layers, adapter.device
    probe = torch.randn(1, 4, adapter.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.enable_grad():
        adapter.model(inputs_embeds=probe, use_cache=False).last_hidden_state.square().sum().backward()
    for name, module in list(layer.named_children()):
        parameters = list(module.parameters())
        if parameters and not any(p.grad is not None and p.grad.any() for p in parameters):
            setattr(layer, name, nn.Identity())
    adapter.model.zero_grad()
