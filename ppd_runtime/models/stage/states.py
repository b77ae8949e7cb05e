"""Caches of layers that keep a state instead of, or beside, each token's keys and values.

A recurrent layer leaves a state and a convolution's window after each token. They cannot be cut back to an earlier
token, so a place in the cache holds those *after* its token: a pass starts from a copy of those before it and leaves
its own. What a pass has left never changes, so keeping a branch copies nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import LayersMemory, PreallocatedLayer, SomeLayersCache, StageCache
from ppd_runtime.models.stage.indexed import IndexedLayer
from ppd_runtime.models.stage.library_probe import Kept
from ppd_runtime.models.stage.paired import PairedLayer

State = Mapping[tuple[str, int], Tensor]
"""What a layer leaves after a token: tensors by their kind, `_WINDOW` or `_STATE`, and the library's number."""
_WINDOW, _STATE = "window", "state"
USUAL_BACK = 1
"""Tokens behind the newest to which a text may usually be cut back."""


def is_recurrent(key: tuple[str, int]) -> bool:
    """Whether a tensor of a `State` is a recurrent state, and no convolution's window."""
    return key[0] == _STATE


class StateLayer(PreallocatedLayer):
    """One layer's states by position, and its keys and values; either may be absent, or both.

    Args:
        kept: what the layer keeps.
    """

    def __init__(self, capacity: int, kept: Kept, memory: LayersMemory, index: int) -> None:
        super().__init__(capacity, kept.window, memory, index)
        self.kept = kept
        self.states: dict[int, State] = {}
        """By the position of the token that left it."""
        self._start = 0
        self._made: dict[tuple[str, int], Tensor] = {}

    def begin_pass(self) -> None:
        """Note where a pass starts: after the tokens that the layer holds."""
        self._start, self._made = self.length, {}

    def end_pass(self, tokens: int, back: int | None) -> None:
        """Count the pass' tokens and keep what it left after the last of them.

        Several tokens are part of a prompt, before which no other pass starts. Otherwise the states of the last `back`
        tokens before stay; None: all.
        """
        self.length = self._start + tokens
        if self._made:
            if tokens > 1:
                self.states.clear()
            self.states[self.length - 1], self._made = self._made, {}
            if back is not None:
                self.forget_before(self.length - 1 - back)

    def forget_before(self, position: int) -> None:
        """Drop the states that tokens before `position` left."""
        for old in [held for held in self.states if held < position]:
            del self.states[old]

    def forget_from(self, position: int) -> None:
        """Drop the states that the token at `position` and later ones left."""
        for newer in [held for held in self.states if held >= position]:
            del self.states[newer]

    def before(self, kind: str, number: int) -> Tensor | None:
        """A copy, for the pass alone, of what the token before it left; None at the start of a text.

        The library writes into it in passes of one token.
        """
        key = kind, number
        if key not in self._made and self._start:
            if (parent := self.states.get(self._start - 1)) is None:
                raise RuntimeError(f"the state after token {self._start - 1} is not held, and a pass starts from it")
            if key in parent:
                self._made[key] = parent[key].clone()
        return self._made.get(key)

    def add_window(self, inputs: Tensor, number: int, size: int | None) -> Tensor:
        """Append a pass' inputs of a convolution, `[1, channels, tokens]`, to the window before them; gives both.

        A window has `size` tokens; a new one is as long as the inputs if the library does not say, and is filled up
        with zeros.
        """
        before = self.before(_WINDOW, number)
        size = before.shape[-1] if before is not None else size or inputs.shape[-1]
        whole = inputs if before is None else torch.cat([before, inputs], dim=-1)
        if (missing := size - whole.shape[-1]) > 0:
            whole = torch.nn.functional.pad(whole, (missing, 0))
        self._made[_WINDOW, number] = whole[..., -size:].clone()
        return whole

    def put_state(self, state: Tensor, number: int) -> Tensor:
        """Take a pass' new recurrent state."""
        is_part = state.untyped_storage().nbytes() > state.nbytes  # of a larger tensor, which would stay in memory
        self._made[_STATE, number] = state.clone() if is_part else state
        return state

    def tensors(self, position: int) -> list[Tensor]:
        """What the token at `position` left: its key and value, then its state."""
        row = self.order.rows(position, position + 1)
        state = self.states[position] if self.kept.states else {}
        return [*(rows[row] for rows in self.rows), *(state[key] for key in sorted(state))]


class StateLayersCache(SomeLayersCache):
    """Some layers of a cache with states, as the library's decoders take it."""

    def _layer(self, layer_idx: int) -> StateLayer:
        layer = self.layers[self._places[layer_idx]]
        assert isinstance(layer, StateLayer)
        return layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The convolution's window before the pass, `[1, channels, size]`; None at the start of a text."""
        return self._layer(layer_idx).before(_WINDOW, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state before the pass; None at the start of a text."""
        return self._layer(layer_idx).before(_STATE, state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Append a pass' inputs to the window, and give both."""
        return self._layer(layer_idx).add_window(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Take a pass' new recurrent state."""
        return self._layer(layer_idx).put_state(recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a token has run before the pass."""
        first = self.layers[0] if layer_idx is None else self._layer(layer_idx)
        return bool(first.get_seq_length())

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always false: the states after earlier tokens are kept here."""
        return False


class StateCache(StageCache):
    """What a stage's layers keep of one sequence, where some of them keep a state.

    Args:
        kept: what each layer keeps, those before the stage's `first` layer too, of which nothing is stored.
        dtype: the model's, in which entries travel.
    """

    layers: list[StateLayer]

    def __init__(self, kept: Sequence[Kept], capacity: int, first: int = 0, dtype: torch.dtype = torch.float32) -> None:
        with_entries = [number for number, layer in enumerate(kept) if layer.entries and number >= first]
        memory = LayersMemory(max(1, len(with_entries)))
        super().__init__([layer.window for layer in kept], capacity, first, memory)
        places = {number: place for place, number in enumerate(with_entries)}
        self.layers = [StateLayer(capacity, layer, memory, places.get(number, 0)) for number, layer in enumerate(kept)]
        self._dtype = dtype
        self.back: int | None = USUAL_BACK
        """Tokens behind the newest whose states stay; None: all, until they are dropped."""

    def view(self, numbers: Sequence[int]) -> StateLayersCache:
        """The layers with these numbers, for forward passes that run no others; the same each time."""
        key = tuple(numbers)
        if key not in self._views:
            self._views[key] = StateLayersCache([self.layers[number] for number in key], key)
        view = self._views[key]
        assert isinstance(view, StateLayersCache)
        return view

    def begin_pass(self, numbers: Sequence[int]) -> None:
        """Before a pass through the layers with these numbers."""
        for number in numbers:
            self.layers[number].begin_pass()

    def end_pass(self, numbers: Sequence[int], tokens: int) -> None:
        """After a pass of `tokens` tokens through the layers with these numbers."""
        for number in numbers:
            self.layers[number].end_pass(tokens, self.back)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, drop the newer ones; no text is cut back further than that, if all states
        stay.
        """
        super().truncate(length)
        for layer in self.layers:
            layer.forget_from(length)
            if self.back is None:
                layer.forget_before(layer.length - 1)

    def forget_before(self, position: int) -> None:
        """Drop the states that tokens before `position` left."""
        for layer in self.layers:
            layer.forget_before(position)

    def forget(self, position: int) -> None:
        """Drop the states that the token at `position` left."""
        for layer in self.layers:
            layer.states.pop(position, None)

    def move(self, source: int, target: int) -> None:
        """Have what a token left lie at another position, which is free, in all of the stage's layers."""
        super().move(source, target)
        for layer in self.layers:
            if (state := layer.states.pop(source, None)) is not None:
                layer.states[target] = state

    def keep_path(self, position: int, nodes: Sequence[int]) -> None:
        """See `StageCache.keep_path`."""
        for layer in self.layers:
            kept = {
                position + i: layer.states[position + n] for i, n in enumerate(nodes) if position + n in layer.states
            }
            layer.forget_from(position)
            layer.states |= kept
        super().keep_path(position, nodes)

    def states_after(self, length: int) -> tuple[State, ...]:
        """What the last of the first `length` tokens left in each of the stage's layers, but keys and values."""
        return tuple(layer.states.get(length - 1, {}) for layer in self.layers[self._first :])

    @torch.inference_mode()
    def append_chunk(self, entries: Sequence[Tensor], states: Sequence[State], tokens: int) -> None:
        """Append a chunk of so many tokens: the entries that `copy_rows` has given, and the states after it."""
        layers = self.layers[self._first :]
        start, pairs = layers[0].length, iter(zip(entries[::2], entries[1::2], strict=True))
        for layer, state in zip(layers, states, strict=True):
            layer.begin_pass()
            if layer.kept.entries:
                keys, values = next(pairs)
                layer.write(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            layer.length = start + tokens
            layer.states = {layer.length - 1: state} if state else {}

    def entry_shape(self, last: int) -> tuple[int, ...]:
        """Shape of half of what a token leaves in any of the layers 0 to `last`; empty before any pass.

        These are numbers of the model's dtype whose bytes are those of all its tensors, padded to the largest layer's.
        """
        if last not in self._shapes:
            newest = [max(layer.states, default=-1) if layer.kept.states else 0 for layer in self.layers[:last]]
            ready = [bool(layer.rows) or not layer.kept.entries for layer in self.layers[:last]]
            if min(newest) < 0 or not all(ready):
                return ()
            sizes = [
                sum(part.nbytes for part in layer.tensors(at)) for layer, at in zip(self.layers, newest, strict=False)
            ]
            self._shapes[last] = (1, max(1, -(-max(sizes) // (2 * self._dtype.itemsize))))
        return self._shapes[last]

    def held_from(self, first: int, last: int) -> int:
        """The end of the run of tokens from `first` on that `export_entries` can give for the layers 0 to `last`."""
        layers = self.layers[:last]
        end = first
        while all(end < layer.length and (not layer.kept.states or end in layer.states) for layer in layers):
            end += 1
        return end

    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """A copy of what the tokens `first` to `end` left in layers 0 to `last` (both ends exclusive).

        `[tokens, last, 2, 1, numbers]`, see `entry_shape`; RuntimeError where a layer does not hold it all.
        """
        if self.held_from(first, last) < end:
            raise RuntimeError(f"entries {first} to {end} of {last} layers are asked for, and not all are held")
        _, numbers = self.entry_shape(last)
        size = 2 * numbers * self._dtype.itemsize
        tensors = [layer.tensors(at) for at in range(first, end) for layer in self.layers[:last]]
        device = next((part.device for parts in tensors for part in parts), None)
        return (
            torch.stack([_packed(parts, size, device) for parts in tensors])
            .view(self._dtype)
            .view(end - first, last, 2, 1, numbers)
        )

    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append what consecutive tokens left, each as `export_entries` gives it, to the layers it came from."""
        layers = self.layers[: entries[0].shape[0]]
        if len({layer.length for layer in layers}) > 1:
            raise RuntimeError("layers hold different numbers of tokens: entries continue all or none")
        for number, layer in enumerate(layers):
            for entry in entries:
                self._import(layer, entry[number])

    def _import(self, layer: StateLayer, entry: Tensor) -> None:
        position, keys = layer.length, sorted(next(iter(layer.states.values()), {}))
        layer.begin_pass()
        like = [*(rows[:1] for rows in layer.rows), *(layer.states[max(layer.states)][key] for key in keys)]
        tensors = list(_unpacked(entry.contiguous().view(-1).view(torch.uint8), like))
        if layer.rows:
            key, value = tensors[:2]
            layer.write(key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        layer.length = position + 1
        if keys:
            layer.states[position] = dict(zip(keys, tensors[len(layer.rows) :], strict=True))
            if self.back is not None:
                layer.forget_before(position - self.back)


def new_cache(
    kept: Sequence[Kept], capacity: int, first: int = 0, dtype: torch.dtype = torch.float32, moves: bool = True
) -> StageCache:
    """A cache for layers that keep this: a `StateCache` if one keeps something else than keys and values."""
    if not all(layer.is_plain for layer in kept):
        return StateCache(kept, capacity, first, dtype)
    cache = StageCache([layer.window for layer in kept], capacity, first, moves=moves)
    for number, of_layer in enumerate(kept):
        if of_layer.index_size:
            cache.layers[number] = IndexedLayer(capacity, cache.memory, number - first, of_layer.index_size)
        elif of_layer.attentions > 1:
            cache.layers[number] = PairedLayer(capacity, of_layer.window, cache.memory, number - first)
        cache.layers[number].is_chunked = of_layer.chunked
    return cache


def _packed(tensors: Sequence[Tensor], size: int, device: torch.device | None) -> Tensor:
    """The tensors' bytes one after the other, and zeros up to `size`: `[size]`, on the device."""
    each = [part.contiguous().view(-1).view(torch.uint8) for part in tensors]
    bytes_of_all = torch.cat(each) if each else torch.empty(0, dtype=torch.uint8, device=device)
    return torch.nn.functional.pad(bytes_of_all, (0, size - len(bytes_of_all)))


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of the shapes and dtypes of `like` from their bytes."""
    start = 0
    for part in like:
        end = start + part.nbytes
        yield packed[start:end].clone().view(part.dtype).view(part.shape)
        start = end
