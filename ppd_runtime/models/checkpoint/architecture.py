"""Finds out whether a model can be cut into stages, from its code and configuration, without its weights."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig, PreTrainedModel

from ppd_runtime.models.checkpoint.config import skeleton_of
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.stage.chunks import longest_in_chunks
from ppd_runtime.models.stage.decoder_parts import cache_argument, decoder_in, decoder_name, has_final_norm
from ppd_runtime.models.stage.library_probe import (
    CannotCutError,
    Kept,
    attention_masks,
    check_cut_layers,
    embedding_scale,
    kept_by_layers,
    recomputed_at,
)
from ppd_runtime.models.stage.rotary import most_positions
from ppd_runtime.models.stage.slicing import FinalHead, decoder_of, some_layers
from ppd_runtime.models.stage.states import new_cache
from ppd_runtime.models.stage.trees import chain_of
from ppd_runtime.models.stage.wide import is_wide, state_size, with_own_caches


@dataclass(frozen=True)
class Architecture:
    """What a model's code and configuration tell."""

    skeleton: PreTrainedModel
    """A layer of each kind, without weights."""
    recomputed_at: int | None
    """See `ModelInfo`."""
    longest_in_chunks: int | None
    """See `ModelInfo`."""


_MOST_KNOWN = 64
_known: dict[tuple[type, str], Architecture] = {}  # a program opens the same model again and again


def architecture_of(model: str, config: PretrainedConfig) -> Architecture:
    """The `Architecture`, cached by configuration; ValueError if it cannot be cut into stages."""
    key = (type(config), config.to_json_string(use_diff=False))
    if (found := _known.get(key)) is None:
        skeleton = check_architecture(model, config)
        most = most_positions(config)
        recomputed_at = tokens_until_recomputed(model, skeleton, most) if most else None
        found = Architecture(skeleton, recomputed_at, longest_in_chunks(skeleton, most))
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found


def check_architecture(model: str, config: PretrainedConfig) -> PreTrainedModel:
    """A skeleton of the model, with a layer of each kind; ValueError for one that cannot be cut into stages."""
    refuse = f"model {model!r} ({config.model_type}): "
    needed = "a decoder with `model.layers`, a final norm and `lm_head` is needed, such as Llama, Mistral or Qwen"
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{refuse}an encoder-decoder cannot be pipelined here; {needed}")
    if (text := config.get_text_config(decoder=True)) is not config:
        around = f"a model around a text model ({text.model_type}), of a kind whose text model is not run by itself"
        raise ValueError(f"{refuse}{around}; docs/families.md names the kinds that are")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "num_hidden_layers"):
        raise ValueError(f"{refuse}not a causal language model; {needed}")
    if why := _untold_inputs(config):
        raise ValueError(f"{refuse}{why}")
    try:
        kept = kept_by_layers(config)
    except CannotCutError as error:
        raise ValueError(f"{refuse}{error}") from error
    try:
        skeleton, deeper = skeleton_of(config, 1), skeleton_of(config, depth_of_all_kinds(config, kept))
    except Exception as error:  # every architecture checks its settings in its own way
        cause = f": {_in_words(error)}" if isinstance(error, ValueError | KeyError) else ""
        raise ValueError(f"{refuse}transformers cannot build its first layers from config.json{cause}") from error
    base = decoder_in(skeleton) if decoder_name(skeleton) else None
    layers = getattr(base, "layers", None)
    if not isinstance(base, nn.Module) or not isinstance(layers, nn.ModuleList) or not layers:
        raise ValueError(f"{refuse}{needed}")
    if not has_final_norm(base) or not hasattr(skeleton, "lm_head"):
        raise ValueError(f"{refuse}{needed}")
    if _constants(layers[0]) != _constants(decoder_in(deeper).layers[0]):
        raise ValueError(f"{refuse}what a layer computes depends on how many there are, so they cannot be cut")
    try:
        scale = embedding_scale(deeper)
        _check_layers(deeper, kept, scale)
    except Exception as error:  # every architecture asks for its own inputs
        theirs = "transformers' code needs more than states and a cache"
        own = error if isinstance(error, CannotCutError) else theirs
        raise ValueError(f"{refuse}its layers cannot run one by one: {own}; {needed}") from error
    return deeper


def _untold_inputs(config: PretrainedConfig) -> str | None:
    """What layers would need besides hidden states and what their own tokens have left; None: nothing known."""
    if getattr(config, "use_bidirectional_attention", None) in ("all", True):
        return "a token attends to later tokens too, so a text cannot be continued token by token"
    if "shared" in (getattr(config, "indexer_types", None) or ()):
        return "some layers attend to the tokens that another layer has chosen, which may be in another stage"
    if config.model_type in ("zamba", "zamba2"):
        return "some layers share their weights with layers that may be in another stage"
    chosen = getattr(config, "index_topk", 1)
    if not isinstance(chosen, int) or chosen < 1:
        return f"index_topk={chosen!r}, but each token attends to one or more"
    if getattr(config, "num_kv_shared_layers", None) and getattr(config, "hidden_size_per_layer_input", None) == 0:
        return "transformers' code runs layers that share keys and values only with per-layer inputs"
    return None


def tokens_until_recomputed(model: str, skeleton: PreTrainedModel, most_tokens: int) -> int | None:
    try:
        return recomputed_at(skeleton, most_tokens)
    except Exception as error:  # every architecture prepares its inputs in its own way
        kind, reason = skeleton.config.model_type, one_line(error)
        raise ValueError(f"model {model!r} ({kind}): does not say how it goes on with a text: {reason}") from error


def depth_of_all_kinds(config: PretrainedConfig, kept: Sequence[Kept]) -> int:
    """How many first layers include every kind; at least 2, if there are so many. All, where states are wide."""
    if is_wide(config):
        return len(kept)
    names = getattr(config, "layer_types", None) or [""] * len(kept)
    kinds = list(zip(names, kept, strict=False))
    return min(len(kept), max(2, *(1 + kinds.index(kind) for kind in set(kinds))))


def _check_layers(skeleton: PreTrainedModel, kept: Sequence[Kept], scale: str | None) -> None:
    """Refuse layers that a token's pass cannot run one by one, from hidden states and a cache alone."""
    layers = decoder_in(skeleton).layers
    position = 1 + max(layer.window or 1 for layer in kept)
    cache = DynamicCache(config=with_own_caches(skeleton.config))
    for layer in (layer for layer, of_layer in zip(cache.layers, kept, strict=False) if of_layer.entries):
        entries = torch.zeros(1, 1, position, 1, device="cpu")
        layer.update(entries, entries)
    kinds = getattr(skeleton.config, "layer_types", None) or ["one kind"] * len(layers)
    ours = new_cache(kept, position + 1)
    ours.set_length(position)
    expected = chain_of(1, torch.device("cpu")).masks(dict(enumerate(ours.layers)), torch.float32)
    for number, mask in enumerate(attention_masks(skeleton, cache, 1, position)):
        if kept[number].chunked or (mask is not None and not mask.all()):
            seen = torch.ones_like(expected[number], dtype=torch.bool) if mask is None else mask.cpu()
            if not torch.equal(seen, expected[number] == 0):
                raise CannotCutError(
                    f"in layers of {kinds[number]} a token attends to other tokens than their caches say"
                )
    check_cut_layers(skeleton, lambda decoder, number: some_layers(decoder, [number]))
    states = torch.zeros(1, 1, state_size(skeleton.config), device="meta", dtype=skeleton.dtype)
    for number, layer in enumerate(layers):
        view = new_cache(kept, 1).view([number])
        piece = decoder_of(skeleton, {number: layer}, scale)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # experts cannot be chosen without numbers
            piece(inputs_embeds=states, **{cache_argument(piece): view}, use_cache=True)
    FinalHead(skeleton).module(inputs_embeds=states, use_cache=False)


def _constants(layer: nn.Module) -> dict[tuple[str, str], float]:
    """The numbers that a layer's modules were built with."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float)
    }


def _in_words(error: ValueError | KeyError) -> str:
    """What a model's code says of its settings, in a line."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return " ".join(str(error).split())[:200]
