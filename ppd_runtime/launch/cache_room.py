"""How many tokens' keys and values fit on the workers' devices, and so how many requests they decode at once."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from ppd_runtime.host import free_memory_bytes
from ppd_runtime.launch.gpus import free_bytes
from ppd_runtime.models.checkpoint.config import model_config, skeleton_of, weight_files
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.checkpoint.quantisable import HEAD, quantised_linears
from ppd_runtime.models.checkpoint.quantised import FORMAT_OF_HEAD
from ppd_runtime.models.checkpoint.weights_card import card_of
from ppd_runtime.models.native.packing import packed_bytes
from ppd_runtime.models.native.quantising import FORMAT_OF
from ppd_runtime.models.trained.drafter import DrafterInfo
from ppd_runtime.settings.layouts import DECIDER
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
    config = model_config(main.info.folder)
    layer_weights = _weight_bytes(main.info, config, main.dtype) / main.info.num_layers
    layer_entries = layer_entry_bytes(config, main.dtype)
    weights, entries = defaultdict[str, float](float), defaultdict[str, int](int)
    for spec in specs:
        layers, (drafter, of_token) = spec.num_layers - spec.first_layer, drafter_bytes(spec)
        weights[spec.device] += layers * layer_weights + drafter
        entries[spec.device] += layers * layer_entries + of_token
    rooms = (_SHARE * (_free_bytes(device) - weights[device]) / entries[device] for device in weights)
    return max(_FEWEST, min(_MOST, *map(int, rooms)))


def requests_for(tokens: int | None) -> int:
    """Requests at once, if there is room for `tokens` tokens; None: no limit."""
    return MOST_REQUESTS if tokens is None else max(1, min(MOST_REQUESTS, tokens // _USUAL_TOKENS))


def layer_entry_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's key and value in a layer's cache; if layers differ, in a usual layer."""
    if rank := getattr(config, "kv_lora_rank", None):  # latent attention caches what keys and values are made from
        return int((rank + config.qk_rope_head_dim) * dtype.itemsize)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    key = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads * (key + (getattr(config, "v_head_dim", None) or key)) * dtype.itemsize)


def drafter_bytes(spec: WorkerSpec) -> tuple[int, int]:
    """Bytes of the trained drafter that a worker asks, and of one token's key and value there; 0 without one."""
    if not isinstance(spec.drafter, DrafterInfo) or spec.rank != spec.layout.guesser:
        return 0, 0
    return spec.drafter.num_bytes(spec.device), spec.drafter.entry_bytes


def _weight_bytes(info: ModelInfo, config: PretrainedConfig, dtype: torch.dtype) -> float:
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
    of_layer = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    return sum(sizes.values()) + (config.num_hidden_layers - 1) * of_layer


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return free_bytes(device)
    return free_memory_bytes()
