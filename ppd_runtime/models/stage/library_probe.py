"""What the library's code does for a model, found by asking it: a configuration may hold fields that no code reads."""

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT, cache_argument, decoder_in, final_norm, shallow_copy
from ppd_runtime.models.stage.paired import attends_twice
from ppd_runtime.models.stage.wide import argument_names, is_wide, pass_states_on, with_own_caches

_PLAIN = {DynamicLayer, DynamicSlidingWindowLayer}
"""Caches of keys and values by position, and nothing else."""
_WITH_STATES = {
    getattr(cache_utils, name, None): entries
    for name, entries in (
        ("LinearAttentionLayer", False),
        ("LinearAttentionAndFullAttentionLayer", True),
        ("LinearAttentionAndSlidingWindowAttentionLayer", True),
    )
    if hasattr(Cache, "get_conv_state")  # versions before pass states in another way
}
"""Caches of a recurrent state, and whether they have keys and values by position too."""


_INDEXED = getattr(cache_utils, "DynamicIndexedLayer", None)
"""Caches of keys and values by position, and of an index' keys."""
_CHUNKED = "chunked_attention"
"""A kind of layer by the library's name; its cache is that of a window."""


_OTHER_CACHES = {
    "indexed_attention": "choose the tokens that they attend to by an index, whose own keys are not kept here",
    **dict.fromkeys(
        ("compressed_sparse_attention", "heavily_compressed_attention"),
        "keep several tokens as one compressed entry, which cannot be cut back to a token",
    ),
}
"""What layers of the library's other kinds do."""
_WITHOUT_CACHE = {"mlp", "moe"}
"""Kinds of layers, by the library's names, that keep nothing."""


class CannotCutError(ValueError):
    """Says in our own words why a model cannot be cut into stages."""


class Kept(NamedTuple):
    """What a layer keeps of the tokens that it has seen."""

    window: int | None
    """How many tokens' keys and values a one-token pass attends to, its own among them; None: all of them."""
    entries: bool = True
    """Whether it keeps keys and values."""
    states: bool = False
    """Whether it keeps a recurrent state or a convolution's window."""
    chunked: bool = False
    """Whether a token attends only within its own chunk of the text, of `window` tokens; chunks start at position 0."""

    attentions: int = 1
    """Attentions of the layer, each with keys and values of its own."""
    index_size: int = 0
    """Numbers of a token's key in the index by which the layer chooses the tokens that it attends to; 0: no index."""

    @property
    def is_plain(self) -> bool:
        """Whether it keeps keys and values, and nothing else."""
        return self.entries and not self.states


def cache_windows(config: PretrainedConfig) -> list[int | None]:
    """For each layer, how many tokens a one-token pass attends to, its own among them; None: all of them.

    Raises:
        ValueError: where a layer's cache holds something else than keys and values by position.
    """
    kept, kinds = kept_by_layers(config), getattr(config, "layer_types", None)
    if odd := {kinds[number] if kinds else "state" for number, layer in enumerate(kept) if not layer.is_plain}:
        raise _no_plain_cache(odd)
    return [layer.window for layer in kept]


def unlike_layers(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Each layer's configuration, if layers differ; else that of all."""
    each: Sequence[PretrainedConfig] = config.per_layer_config if getattr(config, "is_heterogeneous", False) else ()
    return each or [config]


def has_chunks(config: PretrainedConfig) -> bool:
    """Whether a layer attends in chunks of the text."""
    return any(layer.chunked for layer in kept_by_layers(config))


def most_chosen(config: PretrainedConfig) -> int | None:
    """To how many tokens a token attends at most, where layers choose them by an index; None without an index."""
    return int(config.index_topk) if any(layer.index_size for layer in kept_by_layers(config)) else None


def runs_in_library(config: PretrainedConfig) -> str | None:
    """What layers do that only the library's code does; None where they do no such thing."""
    if is_wide(config):
        return "read more of a token than a hidden state"
    if has_chunks(config):
        return "attend in chunks of the text"
    if attends_twice(config):
        return "have two attentions each"
    return None if most_chosen(config) is None else "choose the tokens that they attend to by an index"


def has_states(config: PretrainedConfig) -> bool:
    """Whether a layer keeps a recurrent state, or nothing, as such models' layers without attention do."""
    return not all(layer.is_plain for layer in kept_by_layers(config))


def kept_by_layers(config: PretrainedConfig) -> list[Kept]:
    """What each layer keeps: what the library's own cache hands out, whatever the configuration calls it.

    Raises:
        ValueError: where a layer's cache holds something else than keys and values by position, and a recurrent state.
    """
    try:
        layers = DynamicCache(config=with_own_caches(config)).layers
    except KeyError as error:  # some kinds the library learns of with the model's code
        known: dict[str, type] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
        plain = {kind for kind, layer in known.items() if layer in _PLAIN or layer in _WITH_STATES}
        raise _no_plain_cache({*config.layer_types} - plain) from error
    kinds = getattr(config, "layer_types", None) or [type(layer).__name__ for layer in layers]
    index = getattr(config, "index_head_dim", None) or 0
    known_layers = {*_PLAIN, *_WITH_STATES, *([_INDEXED] if index else [])}
    with_cache = [(kind, layer) for kind, layer in zip(kinds, layers, strict=False) if kind not in _WITHOUT_CACHE]
    if odd := {str(kind) for kind, layer in with_cache if type(layer) not in known_layers}:
        raise _no_plain_cache(odd)
    found = {size: _entries_handed_out(size) for size in {getattr(layer, "sliding_window", None) for layer in layers}}
    windows = [found[getattr(layer, "sliding_window", None)] for layer in layers]
    return [
        Kept(None, entries=False)
        if kind in _WITHOUT_CACHE
        else Kept(
            window,
            _WITH_STATES.get(type(layer), True),
            type(layer) in _WITH_STATES,
            kind == _CHUNKED,
            1 + attends_twice(config),
            index if type(layer) is _INDEXED else 0,
        )
        for window, layer, kind in zip(windows, layers, kinds, strict=False)
    ]


def _no_plain_cache(kinds: set[str]) -> CannotCutError:
    words = sorted({_OTHER_CACHES.get(kind, f"are of kind {kind}, of which nothing is kept here") for kind in kinds})
    return CannotCutError(f"some of its layers {' and '.join(words)}")


def _entries_handed_out(size: int | None) -> int | None:
    """What a cache of the library's for a window of `size` tokens gives a one-token pass; None: all that came."""
    if size is None:
        return None
    layer = DynamicSlidingWindowLayer(sliding_window=size)
    for tokens in (size + 1, 1):
        keys, _ = layer.update(*(torch.zeros(1, 1, tokens, 1, device="cpu"),) * 2)
    return keys.shape[-2] if keys.shape[-2] < size + 2 else None


def attention_masks(model: PreTrainedModel, cache: Cache, tokens: int, position: int) -> list[Tensor | None]:
    """What each layer is told to attend to in a pass of `tokens` tokens from `position` on, `[1, 1, tokens, attended]`.

    True where a token is seen; None where the library leaves the mask out. `model` may be on the meta device: only its
    decoder's own code runs, with stand-ins for the layers.
    """
    decoder, device = without_weights(model)
    told = _told_layers(decoder, device, model, cache, tokens, position)
    masks = [told[number].get("attention_mask") for number in sorted(told)]
    return [mask if mask is None or mask.dtype == torch.bool else mask == 0 for mask in masks]


def check_cut_layers(model: PreTrainedModel, some_layers: Callable[[nn.Module, int], nn.Module]) -> None:
    """Raise ValueError where a layer that runs alone is embedded at other positions than among the others.

    `some_layers` gives the part of a decoder that has a single one of its layers.
    """
    decoder, device = without_weights(model)
    whole = _told_layers(decoder, device, model, DynamicCache(config=model.config), 1, 5)
    for number in whole:
        alone = _told_layers(some_layers(decoder, number), device, model, DynamicCache(config=model.config), 1, 5)
        if not _alike(alone[0].get("position_embeddings"), whole[number].get("position_embeddings")):
            raise CannotCutError(f"layer {number + 1} alone is given other positions than among the others")


def recomputed_at(model: PreTrainedModel, most_tokens: int) -> int | None:
    """The length of a text at which `generate` drops its cache and runs the whole text again; None where it never does.

    The library does so for models whose rotary embedding has one table for short and another for long texts.
    """

    def drops(length: int, held: int) -> bool:
        ids = torch.zeros(1, length, dtype=torch.int64, device="cpu")
        cache = _CacheOf(held)
        inputs = model.prepare_inputs_for_generation(ids, **{CACHE_ARGUMENT: cache}, use_cache=True)
        return inputs.get(CACHE_ARGUMENT) is not cache

    if not drops(most_tokens, 1):
        return None
    length = bisect_left(range(most_tokens + 1), True, lo=2, key=lambda size: drops(size, 1))
    return length if drops(length, length - 1) else None


def embedding_scale(model: PreTrainedModel) -> str | None:
    """The attribute of a decoder by which it multiplies what it is given, such as Granite's; None where it does not.

    With 1 in its place, a pass that is given hidden states begins with just these.

    Raises:
        ValueError: where the decoder, apart from its layers and its final norm, does more than that.
    """
    decoder, device = without_weights(model)
    decoder.layers = nn.ModuleList()
    setattr(decoder, final_norm(decoder), _Doubling())
    states = torch.linspace(-1, 1, model.config.hidden_size, device=device, dtype=model.dtype).view(1, 1, -1)

    def leaves_states() -> bool:
        with torch.inference_mode():
            return torch.equal(decoder(inputs_embeds=states, use_cache=False).last_hidden_state, 2 * states)

    if leaves_states():
        return None
    for name, value in list(vars(decoder).items()):
        if type(value) in (int, float):
            setattr(decoder, name, 1.0)
            if leaves_states():
                return name
            setattr(decoder, name, value)
    raise CannotCutError("the model does more than run layers and a final norm, so it cannot be cut")


def table_borders(rotary: nn.Module, most_positions: int) -> tuple[int, ...]:
    """Positions from which on a pass takes another rotary table than passes that end before, ascending.

    `rotary` is a decoder's rotary embedding; what an odd one raises, passes through.
    """
    kinds = getattr(rotary, "rope_type", None)
    of_kinds = [_borders(rotary, kind, most_positions) for kind in (kinds if isinstance(kinds, dict) else [None])]
    return tuple(sorted(set().union(*of_kinds)))


def _borders(rotary: nn.Module, kind: str | None, most_positions: int) -> list[int]:
    device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
    states = torch.zeros(1, 1, 1, device=device)
    more = () if kind is None else (kind,)

    def first_row(newest: int) -> Tensor:
        """Position 1's row of the table that a pass takes whose newest position is `newest`."""
        parts = rotary(states, torch.tensor([[1, newest]], device=device), *more)
        return torch.cat([part[0, 0].flatten() for part in (parts if isinstance(parts, tuple) else (parts,))])

    borders, start = list[int](), 1
    while not torch.equal(first_row(most_positions - 1), before := first_row(start)):
        start = bisect_left(
            range(most_positions), True, lo=start, key=lambda newest: not torch.equal(first_row(newest), before)
        )
        if start in borders:
            raise ValueError("its rotary table is not a number")
        borders.append(start)
    return borders


class _Doubling(nn.Module):
    """Stands in for a norm, and shows how often it was asked."""

    def forward(self, states: Tensor) -> Tensor:
        return 2 * states


class _CacheOf(DynamicCache):
    """A cache that says it holds so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length that it was given."""
        return self._tokens


def without_weights(model: PreTrainedModel) -> tuple[nn.Module, torch.device]:
    """The model's decoder, of which only the layers have weights, on a device that computes."""
    decoder = shallow_copy(decoder_in(model))
    pass_states_on(decoder)
    setattr(decoder, final_norm(decoder), nn.Identity())
    if model.device.type != "meta":
        return decoder, model.device
    for name, child in decoder_in(model).named_children():
        if next(child.buffers(), None) is not None and next(child.parameters(), None) is None:
            setattr(decoder, name, _made_anew(child))
    return decoder, torch.device("cpu")


def _made_anew(rotary: nn.Module) -> nn.Module:
    """A rotary embedding, or several, which have no weights, on a device that computes."""
    if isinstance(rotary, nn.ModuleList):
        return nn.ModuleList(map(_made_anew, rotary))
    with torch.device("cpu"):
        return type(rotary)(rotary.config)


def _told_layers(
    decoder: nn.Module, device: torch.device, model: PreTrainedModel, cache: Cache, tokens: int, position: int
) -> dict[int, dict[str, Any]]:
    """What a decoder tells each of its layers besides the hidden states, in a pass that runs none of them."""
    told: dict[int, dict[str, Any]] = {}
    states = torch.zeros(1, tokens, model.config.hidden_size, device=device, dtype=model.dtype)
    places = torch.arange(position, position + tokens, device=device)[None]
    layers = list(cast("nn.ModuleList", decoder.layers))
    for given in (_alone, _in_a_tuple, _in_a_pair):  # what layers give back, which differs from model to model
        decoder.layers = nn.ModuleList(_notes(layer, i, told, given) for i, layer in enumerate(layers))
        with torch.inference_mode(), contextlib.suppress(*([] if given is _in_a_pair else _TAKEN_APART)):
            feed = {"inputs_embeds": states, "position_ids": places, "use_cache": True}
            output = decoder(**feed, **{cache_argument(decoder): cache})
            if output.last_hidden_state.shape == states.shape:
                break
    decoder.layers = nn.ModuleList(layers)
    return told


_TAKEN_APART = ValueError, IndexError
"""What decoders raise whose layers give back more than states."""


def _alone(states: Tensor) -> Any:
    return states


def _in_a_tuple(states: Tensor) -> Any:
    return (states,)


def _in_a_pair(states: Tensor) -> Any:
    return states, None


def _notes(layer: nn.Module, index: int, told: dict[int, dict[str, Any]], given: Callable[[Tensor], Any]) -> nn.Module:
    """The layer with its attributes, which does nothing but note what it is told."""

    def forward(hidden_states: Tensor, *arguments: Any, **others: Any) -> Any:
        told[index] = dict(zip(argument_names(layer), arguments, strict=False)) | others
        return given(hidden_states)

    twin = shallow_copy(layer)
    twin.forward = forward
    return twin


def _alike(ours: Any, theirs: Any) -> bool:
    """Whether two structures of tensors are the same."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_alike, ours, theirs))
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.equal(ours, theirs)
    return ours is theirs or ours == theirs
