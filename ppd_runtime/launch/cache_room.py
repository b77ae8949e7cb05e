"""How many tokens' keys and values fit on the workers' devices, and so how many requests they decode at once."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from ppd_runtime.host import free_memory_bytes
from ppd_runtime.launch.gpus import free_bytes
from ppd_runtime.launch.memory_needs import drafter_needs, layer_entry_bytes, whole_weight_bytes
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.state_sizes import layer_state_bytes
from ppd_runtime.models.stage.chunks import PROMPT_CHUNKS
from ppd_runtime.models.stage.library_probe import kept_by_layers
from ppd_runtime.settings.layouts import DECIDER, StagedLayout
from ppd_runtime.workers.spec import WorkerSpec

MOST_REQUESTS = 16
"""Most at once by default: passes are then full of certain tokens."""
_USUAL_TOKENS = 1024  # the room that one more request needs
_SHARE = 0.5  # share of free memory: the rest is for passes, kept prefixes, other programs
_FEWEST, _MOST = 2048, 2**20  # tokens


def cache_room(specs: Sequence[WorkerSpec], are_here: bool) -> int | None:
    """Tokens of all requests that stages have room for, in half of what their weights and the drafter's leave free.

    Stages on one device share its memory. None (no limit) if there are no stages, or none on this host.
    """
    main = specs[DECIDER]
    if not main.layout.cuts or not are_here or (main.device.startswith("cuda") and not torch.cuda.is_available()):
        return None
    weights, entries = defaultdict[str, float](float), defaultdict[str, float](float)
    sizes = dict[tuple[Path, torch.dtype], LayerSizes]()
    for spec in specs:
        config = model_config(spec.info.folder)  # a draft model's own, in its process
        layers, drafter = spec.num_layers - spec.first_layer, drafter_needs(spec)
        weights[spec.device] += layers * whole_weight_bytes(spec.info, config, spec.dtype) / spec.info.num_layers
        if (kind := (spec.info.folder, spec.dtype)) not in sizes:
            sizes[kind] = layer_sizes(config, spec)
        weights[spec.device] += layers * sizes[kind].kept
        entries[spec.device] += layers * sizes[kind].of_token
        weights[drafter.device] += drafter.weights
        entries[drafter.device] += drafter.of_token
    rooms = (_SHARE * (_free_bytes(device) - weights[device]) / entries[device] for device in weights)
    return max(_FEWEST, min(_MOST, *map(int, rooms)))


def requests_for(tokens: int | None) -> int:
    """Requests at once, if there is room for `tokens` tokens; None: no limit."""
    return MOST_REQUESTS if tokens is None else max(1, min(MOST_REQUESTS, tokens // _USUAL_TOKENS))


class LayerSizes(NamedTuple):
    """Bytes in a layer's cache, on average over the layers."""

    of_token: float
    """What one token takes."""
    kept: float = 0.0
    """The states at the ends of kept chunks of prompts, whatever requests run."""


def layer_sizes(config: PretrainedConfig, spec: WorkerSpec) -> LayerSizes:
    """What a worker's layers hold of requests, and beside them.

    A usual request's states, those of as many tokens as its stages have in flight, count as its tokens'.
    """
    entries = layer_entry_bytes(config, spec.dtype)
    if not (states := layer_state_bytes(config, spec.dtype)) or not isinstance(spec.layout, StagedLayout):
        return LayerSizes(entries)
    kept = kept_by_layers(config)
    with_entries = sum(layer.entries for layer in kept) / len(kept)
    in_flight = 2 + spec.layout.rows * spec.layout.num_stages
    chunks = spec.prefix_cache_tokens / PROMPT_CHUNKS[-1]
    return LayerSizes(entries * with_entries + states * in_flight / _USUAL_TOKENS, states * chunks)


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return free_bytes(device)
    return free_memory_bytes()
