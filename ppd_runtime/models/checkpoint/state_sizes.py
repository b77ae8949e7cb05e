"""How large the recurrent states are that a model's layers leave after a token, found without its weights."""

import torch
from transformers import PretrainedConfig

from ppd_runtime.models.checkpoint.architecture import depth_of_all_kinds
from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.stage.decoder_parts import decoder_in
from ppd_runtime.models.stage.library_probe import has_states, kept_by_layers
from ppd_runtime.models.stage.state_probe import left_by_layer


def layer_state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> float:
    """Bytes that a token leaves in a layer beside keys and values, on average over the layers; 0 without states."""
    if not has_states(config):
        return 0.0
    kept = kept_by_layers(config)
    kinds = getattr(config, "layer_types", None) or [""] * len(kept)
    skeleton, sizes = skeleton_of(config, depth_of_all_kinds(config, kept), dtype), dict[str, int]()
    for number in range(len(decoder_in(skeleton).layers)):
        sizes[kinds[number]] = sum(part.nbytes for part in left_by_layer(skeleton, number).values())
    return sum(sizes[kind] for kind in kinds) / len(kinds)
