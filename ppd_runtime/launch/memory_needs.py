"""Bytes that models and drafters take in memory, by their files and configurations: nothing is loaded."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from ppd_runtime.models.checkpoint.config import (
    entry_size,
    layer_number,
    model_config,
    skeleton_of,
    weight_files,
)
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.models.checkpoint.quantised import FORMAT_OF_HEAD
from ppd_runtime.models.checkpoint.weights_card import card_of
from ppd_runtime.models.draft_model import DraftModelInfo
from ppd_runtime.models.native.packing import packed_bytes
from ppd_runtime.models.native.quantising import FORMAT_OF
from ppd_runtime.models.stage.library_probe import unlike_layers
from ppd_runtime.models.stage.paired import attends_twice
from ppd_runtime.models.trained.drafter import DrafterInfo
from ppd_runtime.models.trained.published import PublishedInfo
from ppd_runtime.workers.spec import WorkerSpec


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter adds to the process that asks it."""

    device: str
    """Where it runs."""
    weights: int = 0
    """Bytes of what it does not share with the model."""
    of_token: int = 0
    """Bytes of one token's keys and values."""


def drafter_needs(spec: WorkerSpec) -> DrafterNeeds:
    """What the drafter takes that a worker asks in its own process; nothing without one.

    A draft model's own process is a worker, whose layers are counted as other workers' are.
    """
    drafter, beside = spec.drafter, spec.device
    if drafter is None or spec.rank != spec.layout.guesser or spec.layout.drafter is not None:
        return DrafterNeeds(beside)
    if isinstance(drafter, DrafterInfo):
        return DrafterNeeds(beside, drafter.num_bytes(beside), drafter.entry_bytes)
    if isinstance(drafter, DraftModelInfo):
        config, layers = model_config(drafter.info.folder), drafter.info.num_layers
        weights = int(whole_weight_bytes(drafter.info, config, drafter.dtype))
        return DrafterNeeds(drafter.device(beside), weights, layers * layer_entry_bytes(config, drafter.dtype))
    if isinstance(drafter, PublishedInfo):
        config, layers = drafter.layers_config, drafter.layers_config.num_hidden_layers
    else:
        config, layers = model_config(drafter.folder), 1
    weights = drafter.num_weights() * spec.dtype.itemsize
    return DrafterNeeds(beside, weights, layers * layer_entry_bytes(config, spec.dtype))


def layer_entry_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's key and value in a layer's cache; if layers differ, in the largest one."""
    attentions, layers = 1 + attends_twice(config), unlike_layers(config)
    if getattr(layers[0], "kv_lora_rank", None):  # latent attention caches what keys and values are made from
        latent = max(layer.kv_lora_rank + layer.qk_rope_head_dim for layer in layers)
        index = 4 * (getattr(config, "index_head_dim", None) or 0)  # in float32
        return int(attentions * (latent * dtype.itemsize + index))
    heads, key = entry_size(config)
    return int(attentions * heads * (key + (getattr(config, "v_head_dim", None) or key)) * dtype.itemsize)


def whole_weight_bytes(info: ModelInfo, config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Bytes of all weights in memory, by the files that hold them, or by their format."""
    if card_of(info.folder):
        return sum(file.stat().st_size for file in weight_files(info.folder))
    if info.weights:
        return _packed_bytes(info.weights, config, dtype)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else dtype
    return sum(file.stat().st_size for file in weight_files(info.folder)) * dtype.itemsize / stored.itemsize


def _packed_bytes(weights: str, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the packed matrices and of the tensors that stay floats. All layers are taken to be as large as the
    first."""
    skeleton = skeleton_of(config, 1)
    sizes = {name: dtype.itemsize * numbers.numel() for name, numbers in skeleton.named_parameters()}
    for name, linear in quantised_linears(skeleton).items():
        form = FORMAT_OF[FORMAT_OF_HEAD if name == HEAD else weights]
        sizes[name] = packed_bytes(form, linear.out_features, linear.in_features)
    of_layer = sum(size for name, size in sizes.items() if layer_number(name) >= 0)
    return sum(sizes.values()) + (config.num_hidden_layers - 1) * of_layer
