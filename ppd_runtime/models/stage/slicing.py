"""Decoder layers with a sub-layer left out: what remains is the library's own layer, residual stream and norms."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ppd_runtime.models.stage.decoder_parts import decoder_in, final_norm, set_decoder, shallow_copy, states_dtype
from ppd_runtime.models.stage.library_probe import embedding_scale
from ppd_runtime.models.stage.wide import (
    WideLayer,
    WideParts,
    leave_inputs_out,
    pass_states_on,
    state_size,
    wide_parts,
    with_own_caches,
)


@dataclass(frozen=True)
class LayerSet:
    """Sub-layers to leave out, by the numbers of their layers, which count from 0, in ascending order."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


class _NoAttention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._beside = (None, None) if hasattr(attention, "skip_topk") else (None,)  # what an index has chosen, too

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor | None, ...]:
        return torch.zeros_like(hidden_states), *self._beside


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


def without(layer: nn.Module, *, attention: bool = False, mlp: bool = False) -> nn.Module:
    """The layer with its attention, its MLP, or both adding nothing; weights are shared.

    Without attention it neither reads nor writes key/value entries.
    """
    twin = shallow_copy(layer)
    if attention:
        twin.self_attn = _NoAttention(layer.self_attn)
    if mlp:
        twin.mlp = _NoMLP()
    return twin


def check_sub_layers(skeleton: PreTrainedModel) -> None:
    """Raise ValueError where a layer is not an attention and an MLP that can be left out one by one.

    `skeleton` may be on the meta device.
    """
    states = torch.zeros(1, 1, state_size(skeleton.config), device=skeleton.device, dtype=skeleton.dtype)
    scale = embedding_scale(skeleton)
    for number, layer in enumerate(decoder_in(skeleton).layers):
        for left_out in ("attention", "mlp"):
            if not hasattr(layer, {"attention": "self_attn", "mlp": "mlp"}[left_out]):
                raise ValueError(f"layer {number + 1} has no {left_out} of its own to leave out")
            piece = decoder_of(skeleton, {number: without(layer, **{left_out: True})}, scale)
            try:
                with torch.inference_mode(), contextlib.suppress(NotImplementedError, RuntimeError):
                    piece(inputs_embeds=states, use_cache=False)  # without numbers experts cannot be chosen
            except (TypeError, ValueError) as error:
                raise ValueError(f"layer {number + 1} does not run without its {left_out}") from error


def share_run(model: PreTrainedModel, left_out: LayerSet) -> float:
    """Parameters of the attentions and MLPs that stay, as a share of all of them."""
    sizes = [(_size(layer.self_attn), _size(layer.mlp)) for layer in decoder_in(model).layers]
    whole = sum(attention + mlp for attention, mlp in sizes)
    missing = sum(sizes[i][0] for i in left_out.attention) + sum(sizes[i][1] for i in left_out.mlp)
    return 1 - missing / whole


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def with_head_rows(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The model with a head of so many rows; 0: its own."""
    if rows:
        whole = model.lm_head
        model.lm_head = nn.Linear(whole.in_features, rows, whole.bias is not None, dtype=whole.weight.dtype)
    return model


class FinalHead:
    """The end of a model: final norm, head, and whatever the model adds to it, such as a soft cap or a scale.

    Args:
        model: whose end it is; weights are shared.
        lm_head: takes the place of the model's own map from normed states to the vocabulary.
    """

    def __init__(self, model: PreTrainedModel, lm_head: nn.Module | None = None) -> None:
        self._model = model
        decoder = decoder_in(model)
        self._norm: nn.Module = _end_of(model)
        self._lm_head: nn.Module = model.lm_head if lm_head is None else lm_head
        self._library = shallow_copy(model)
        set_decoder(self._library, _NormOnly(self._norm, decoder))
        self._library.lm_head = self._lm_head

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab_size]` of hidden states `[batch, tokens, hidden_size]`, which may be wide."""
        return self._plain_logits(hidden) if self.is_plain else self._library_logits(hidden)

    @property
    def module(self) -> nn.Module:
        """The library's model with nothing before the final norm: takes `inputs_embeds`, gives `logits`."""
        return self._library

    @torch.no_grad()
    def scaled_norm(self) -> tuple[Tensor, float] | None:
        """The weight and the epsilon of the final norm, in float32, if logits are its states' products and it divides
        states by their root mean square; else None.
        """
        found = [getattr(self._norm, name, None) for name in ("variance_epsilon", "eps")]
        epsilon = next((number for number in found if isinstance(number, float)), None)
        if epsilon is None or not self.is_plain:
            return None
        probe = torch.linspace(-8, 8, self._model.config.hidden_size, device=self._model.device)
        weight = self._norm(torch.ones_like(probe)).float() * (1 + epsilon) ** 0.5
        for states in (probe, 1e-3 * probe + 1e-3):
            expected = torch.nn.functional.rms_norm(states, states.shape, weight, epsilon)
            if not torch.allclose(self._norm(states).float(), expected, rtol=1e-4, atol=1e-5):
                return None
        return weight.contiguous(), epsilon

    def _plain_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(self._norm(hidden))

    def _library_logits(self, hidden: Tensor) -> Tensor:
        return self._library(inputs_embeds=hidden, use_cache=False).logits

    @cached_property
    @torch.no_grad()
    def is_plain(self) -> bool:
        """Whether the model does nothing to states before its head and to logits after it."""
        model, dtype = self._model, states_dtype(self._model)
        if dtype != model.dtype:
            return False
        probe = torch.linspace(-8, 8, state_size(model.config), device=model.device, dtype=dtype)
        hidden = probe.view(1, 1, -1)
        return torch.equal(self._plain_logits(hidden), self._library_logits(hidden))


class LayerSubset(NamedTuple):
    """Some layers of a model, as a stage runs them."""

    decoder: nn.Module
    numbers: tuple[int, ...]
    """Its layers."""
    attending: tuple[int, ...]
    """Layers whose entries it reads and writes; the others are without attention."""
    without_mlp: tuple[int, ...] = ()
    """Layers without MLP."""

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self.numbers)


def layer_range(model: PreTrainedModel, first: int, last: int) -> nn.Module:
    """The model's decoder with only the layers `first` to `last` (half-open) and no final norm; it shares weights.

    With `first` 0 it takes tokens or their embeddings, else hidden states.
    """
    scale = embedding_scale(model) if first else None
    return decoder_of(model, {i: decoder_in(model).layers[i] for i in range(first, last)}, scale)


def decoder_of(model: PreTrainedModel, layers: Mapping[int, nn.Module], scale: str | None = None) -> nn.Module:
    """The model's decoder with only these layers, or stand-ins for them, by their numbers, and no final norm.

    It runs over wide states where the model has such.
    `scale` is the model's `embedding_scale`, which it leaves out where it is given hidden states.
    """
    decoder = some_layers(decoder_in(model), list(layers))
    pass_states_on(decoder)
    if parts := wide_parts(model.config):
        layers = {number: WideLayer(layer, number, parts) for number, layer in layers.items()}
    decoder.layers = nn.ModuleList(layers.values())
    setattr(decoder, final_norm(decoder), nn.Identity())
    if scale:
        setattr(decoder, scale, 1.0)
    return decoder


def some_layers(decoder: nn.Module, numbers: Sequence[int]) -> nn.Module:
    """The decoder with the layers of these numbers, and with what else it has one of for each layer."""
    config = cast("PretrainedConfig", decoder.config)
    twin, size = shallow_copy(decoder), config.num_hidden_layers
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == size:
            setattr(twin, name, nn.ModuleList(child[number] for number in numbers))
    twin.config = _some_layers_config(config, numbers)
    return twin


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """What heads ask of a decoder's output."""

    shared_kv_states: Any = None
    cache_params = None  # no field: a library that renamed it would warn of it


def _end_of(model: PreTrainedModel) -> nn.Module:
    """What a decoder does after its layers."""
    decoder = decoder_in(model)
    norm: nn.Module = getattr(decoder, final_norm(decoder))
    parts = wide_parts(model.config)
    return _WideEnd(decoder, norm, parts) if parts else norm


class _WideEnd(nn.Module):
    """What a decoder does after its layers, over wide states, or over hidden states if there is one stream."""

    def __init__(self, decoder: nn.Module, norm: nn.Module, parts: WideParts) -> None:
        super().__init__()
        self.norm, self._parts = norm, parts
        if parts.streams > 1:
            config = _some_layers_config(cast("PretrainedConfig", decoder.config), [0])
            self.decoder, self._no_masks = shallow_copy(decoder), dict.fromkeys(config.layer_types)
            self.decoder.config, self.decoder.layers = config, nn.ModuleList([_Given()])
            leave_inputs_out(self.decoder)

    def forward(self, states: Tensor) -> Tensor:
        """`[rows, tokens, hidden_size]` after the final norm."""
        first = self._parts.first(states)
        if self._parts.streams == 1:
            return cast("Tensor", self.norm(first))
        given = {"given": self._parts.hidden(states), "attention_mask": self._no_masks}
        output = self.decoder(inputs_embeds=first, use_cache=False, **given)
        return cast("Tensor", output.last_hidden_state)


class _Given(nn.Module):
    """Stands in for a decoder's layers: what they have given."""

    def forward(self, _: Tensor, *__: object, given: Tensor, **___: object) -> Tensor:
        return given


class _NormOnly(nn.Module):
    """Stands in for the decoder where only the final norm is left to do."""

    def __init__(self, norm: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        vars(self).update((name, value) for name, value in vars(decoder).items() if type(value) is float)
        self.norm = norm  # the decoder's numbers are there because a head may read one

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: object) -> MoeModelOutputWithPast:
        return _DecoderOutput(last_hidden_state=self.norm(inputs_embeds))


def with_mask_of(masks: Mapping[int, Tensor], number: int, layer: nn.Module) -> nn.Module:
    """The layer, which in each pass takes its mask from `masks`, if there are any, in place of the decoder's."""
    twin, forward = shallow_copy(layer), layer.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        if number in masks:
            kwargs["attention_mask"] = masks[number]
        return forward(*args, **kwargs)

    twin.forward = masked
    return twin


def _some_layers_config(config: PretrainedConfig, numbers: Sequence[int]) -> PretrainedConfig:
    kinds = getattr(config, "layer_types", None)
    whole, config = config, copy.copy(with_own_caches(config))
    config.num_hidden_layers = len(numbers)
    if not kinds or config.layer_types == (some := [kinds[number] for number in numbers]):
        return config
    try:
        config.layer_types = some
    except AttributeError:  # they follow from other settings
        names = [name for name in ("layer_types", "layers_block_type") if hasattr(config, name)]
        fixed = {name: [getattr(whole, name)[number] for number in numbers] for name in names}
        config.__class__ = type(type(config).__name__, (type(config),), fixed)
    return config
