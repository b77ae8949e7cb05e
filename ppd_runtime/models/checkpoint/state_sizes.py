"""How large the recurrent states are that a model's layers leave after a token, found without its weights."""

import contextlib

import torch
from transformers import PretrainedConfig

from ppd_runtime.models.checkpoint.architecture import depth_of_all_kinds
from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.stage.caches import CACHE_ARGUMENT
from ppd_runtime.models.stage.library_probe import embedding_scale, has_states, kept_by_layers
from ppd_runtime.models.stage.slicing import decoder_of
from ppd_runtime.models.stage.states import StateCache

_TOKENS = 2  # of a prompt


def layer_state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Bytes that a token leaves in a layer beside keys and values, on average over the layers; 0 without states."""
    if not has_states(config):
        return 0.0
    kept = kept_by_layers(config)
    kinds = getattr(config, "layer_types", None) or [""] * len(kept)
    skeleton = skeleton_of(config, depth_of_all_kinds(config, kept), dtype)
    scale, sizes = embedding_scale(skeleton), dict[str, int]()
    states = torch.zeros(1, _TOKENS, config.hidden_size, device="meta", dtype=dtype)
    for number, layer in enumerate(skeleton.model.layers):
        cache = StateCache(kept, _TOKENS, dtype=dtype)
        cache.begin_pass([number])
        with contextlib.suppress(RuntimeError, NotImplementedError):  # experts, which come later, need numbers
            piece = decoder_of(skeleton, {number: layer}, scale)
            piece(inputs_embeds=states, **{CACHE_ARGUMENT: cache.view([number])}, use_cache=True)
        cache.end_pass([number], _TOKENS)
        sizes[kinds[number]] = sum(part.nbytes for part in cache.layers[number].states.get(_TOKENS - 1, {}).values())
    return sum(sizes[kind] for kind in kinds) / len(kinds)
