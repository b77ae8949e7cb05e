"""Wide states: what some models' layers read of a token besides one hidden state travels from layer to layer with it.

A layer may read an embedding of its own of the token (per-layer inputs), or the keys and values of an earlier layer
(shared ones); and the state may consist of several streams (AltUp). A token's wide state is a row of all that:

    streams x hidden_size | num_layers x per-layer input | the newest keys and values of each kind of layers

So a layer needs nothing but the states before it, wherever the model is cut. A layer that shares keys and values keeps
a copy in its own cache: which layers a process has makes no difference.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT

_DROPS_TOKENS = "first_kv_shared_layer_idx"
"""A decoder's number of a layer from which on it may drop all tokens but the last."""
NEWEST_ALONE = "newest_alone"
"""What decoders are told, and tell layers, of a prompt's pass: the last token runs as where the others are dropped."""
_MAKES_INPUTS = ("get_per_layer_inputs", "project_per_layer_inputs")
"""A decoder's methods that make per-layer inputs."""
INPUT_MODULES = ("embed_tokens_per_layer", "per_layer_model_projection")
"""A decoder's modules that make per-layer inputs."""


@dataclass(frozen=True)
class WideParts:
    """What a token's wide state has, in this order."""

    hidden_size: int
    streams: int
    """Hidden states of a token; the first one is what heads and drafters read."""
    num_layers: int
    """Layers of the model that have per-layer inputs."""
    input_size: int
    """Numbers of a layer's per-layer input; 0 without any."""
    sources: Mapping[int, str]
    """Layers whose keys and values others read, and their kinds."""
    readers: Mapping[int, str]
    """Layers that read them."""
    shapes: Mapping[str, tuple[int, int]]
    """Heads of shared keys and numbers of a head, by kind."""

    @property
    def size(self) -> int:
        """Numbers of a wide state."""
        return self._end_of_inputs + sum(2 * heads * dim for heads, dim in self.shapes.values())

    @property
    def _end_of_states(self) -> int:
        return self.streams * self.hidden_size

    @property
    def _end_of_inputs(self) -> int:
        return self._end_of_states + self.num_layers * self.input_size

    @cached_property
    def _columns(self) -> Mapping[str, slice]:
        """Where each kind's keys and values are."""
        found, start = dict[str, slice](), self._end_of_inputs
        for kind, (heads, dim) in self.shapes.items():
            found[kind] = slice(start, start + 2 * heads * dim)
            start = found[kind].stop
        return found

    def begin(self, hidden: Tensor, inputs: list[Tensor]) -> Tensor:
        """Wide states before the first layer: `[rows, tokens, size]`.

        Args:
            hidden: as the first layer is given it: `[rows, tokens, hidden_size]`, before it `[streams]` if several.
            inputs: each layer's, `[rows, tokens, input_size]`.
        """
        flat = self._flat(hidden)
        unknown = flat.new_zeros(*flat.shape[:-1], self.size - self._end_of_inputs)
        return torch.cat([flat, *inputs, unknown], dim=-1)

    def hidden(self, wide: Tensor) -> Tensor:
        """The hidden states as the library's layers take them."""
        flat = wide[..., : self._end_of_states]
        if self.streams > 1:
            flat = flat.unflatten(-1, (self.streams, self.hidden_size)).permute(2, 0, 1, 3)
        return flat.contiguous()

    def first(self, wide: Tensor) -> Tensor:
        """The first stream, `[rows, tokens, hidden_size]`."""
        return wide[..., : self.hidden_size].contiguous()

    def input(self, wide: Tensor, layer: int) -> Tensor | None:
        """A layer's per-layer inputs, `[rows, tokens, input_size]`."""
        start = self._end_of_states + layer * self.input_size
        return wide[..., start : start + self.input_size] if self.input_size else None

    def entries(self, wide: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """The tokens' keys and values of a kind of layers, `[rows, heads, tokens, head_dim]` each."""
        both = wide[..., self._columns[kind]].unflatten(-1, (2, *self.shapes[kind])).permute(2, 0, 3, 1, 4)
        return both[0], both[1]

    def after(self, wide: Tensor, hidden: Tensor, kind: str | None, entries: tuple[Tensor, Tensor] | None) -> Tensor:
        """The wide states after a layer, which gave `hidden`, and `entries` if others read those of its kind."""
        found = torch.cat([self._flat(hidden), wide[..., self._end_of_states :]], dim=-1)
        if kind is not None and entries is not None:
            both = torch.stack([part[..., -wide.shape[1] :, :] for part in entries])
            found[..., self._columns[kind]] = both.permute(1, 3, 0, 2, 4).flatten(2)
        return found

    def _flat(self, hidden: Tensor) -> Tensor:
        return hidden.permute(1, 2, 0, 3).flatten(2) if self.streams > 1 else hidden


def wide_parts(config: PretrainedConfig) -> WideParts | None:
    """What a model's wide states have; None where a hidden state is all that travels.

    `config` is the whole model's, also where a model has some of its layers: see `is_wide`.
    """
    if not is_wide(config):
        return None
    size, kinds = config.num_hidden_layers, list(config.layer_types)
    first = size - (getattr(config, "num_kv_shared_layers", None) or 0)
    readers = {number: kinds[number] for number in range(first, size)}
    sources = {first - 1 - kinds[:first][::-1].index(kind): kind for kind in dict.fromkeys(readers.values())}
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * size
    shapes = {kind: (layers[number].num_key_value_heads, layers[number].head_dim) for number, kind in sources.items()}
    streams, of_layer = (getattr(config, name, None) for name in ("altup_num_inputs", "hidden_size_per_layer_input"))
    return WideParts(config.hidden_size, streams or 1, size, of_layer or 0, sources, readers, shapes)


def is_wide(config: PretrainedConfig) -> bool:
    """Whether a model's states are wide. Its parts depend on all layers, so no part of it has a configuration of its
    own: a model with some of its layers has the whole model's."""
    names = ("hidden_size_per_layer_input", "num_kv_shared_layers", "altup_num_inputs")
    return any(getattr(config, name, None) for name in names)


def with_own_caches(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration for the library's cache in which each layer has its own, if it reads another's, too."""
    if getattr(config, "num_kv_shared_layers", None):
        config = copy.copy(config)
        config.num_kv_shared_layers = 0
    return config


def state_size(config: PretrainedConfig) -> int:
    """Numbers of the state that goes from layer to layer."""
    parts = wide_parts(config)
    return parts.size if parts else int(config.hidden_size)


class WideLayer(nn.Module):
    """A layer of the library's over wide states.

    Args:
        layer: whose forward pass is run; it may be changed, as by `without`.
        number: the model's.
    """

    def __init__(self, layer: nn.Module, number: int, parts: WideParts) -> None:
        super().__init__()
        self.layer, self._number, self._parts = layer, number, parts
        self._names = argument_names(layer)

    def forward(self, states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Wide states after the layer; the rest is what the library's decoder tells a layer."""
        parts, number = self._parts, self._number
        wide = states[0] if states.dim() > 3 else states  # the one stream that the decoder knows of
        named |= dict(zip(self._names, arguments, strict=False))
        shared = dict[str, tuple[Tensor, Tensor]]()
        if (kind := parts.readers.get(number)) is not None:
            shared[kind] = parts.entries(wide, kind)
            if (cache := named.get(CACHE_ARGUMENT)) is not None and cache.has(number):
                shared[kind] = cache.update(*shared[kind], number)
        named |= {"per_layer_input": parts.input(wide, number), "shared_kv_states": shared}
        newest_alone = named.pop(NEWEST_ALONE, False)
        hidden = self.layer(parts.hidden(wide), **named)
        if newest_alone and kind is not None:
            hidden = torch.cat([hidden[:, :-1], self.layer(parts.hidden(wide[:, -1:]), **_of_newest(named))], dim=1)
        source = parts.sources.get(number)
        after = parts.after(wide, hidden, source, shared.get(source or ""))
        return after[None] if states.dim() > 3 else after


def _of_newest(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a decoder tells a layer of several tokens, of the last of them alone; it tells nothing else of tokens."""
    cosines, sines = told["position_embeddings"]
    inputs, mask = told["per_layer_input"], told.get("attention_mask")
    own = {
        "position_embeddings": (cosines[:, -1:], sines[:, -1:]),
        "per_layer_input": None if inputs is None else inputs[:, -1:],
        "attention_mask": None if mask is None else mask[:, :, -1:],
    }
    return {**told, **own}


def drops_tokens(decoder: nn.Module) -> bool:
    """Whether the library runs only the last of a prompt's tokens through layers that read others' keys and values."""
    return hasattr(decoder, _DROPS_TOKENS) and wide_parts(cast("PretrainedConfig", decoder.config)) is not None


def argument_names(layer: nn.Module) -> list[str]:
    """What a layer's arguments behind the states are called, in their order."""
    return list(inspect.signature(type(layer).forward).parameters)[2:]


def pass_states_on(decoder: nn.Module) -> None:
    """Have a decoder, which is a copy, give its layers the states that it is given, and nothing made from them."""
    leave_inputs_out(decoder)
    if hasattr(decoder, _DROPS_TOKENS):
        setattr(decoder, _DROPS_TOKENS, None)
    config = cast("PretrainedConfig", decoder.config)
    if getattr(config, "altup_num_inputs", None):
        config = copy.copy(config)
        config.altup_num_inputs = 1
        decoder.config = config


def leave_inputs_out(decoder: nn.Module) -> None:
    """Have a decoder, which is a copy, make no per-layer inputs: all that it tells its layers is None."""
    for name in _MAKES_INPUTS:
        if hasattr(decoder, name):
            setattr(decoder, name, _no_inputs)


class _NoInputs:
    """Stands in for all layers' per-layer inputs."""

    def __getitem__(self, of_layer: object) -> None:
        return None


def _no_inputs(*_: object) -> _NoInputs:
    return _NoInputs()
