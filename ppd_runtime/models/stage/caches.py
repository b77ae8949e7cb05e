"""Key/value caches of a layer range: preallocated, written in place, cut and shipped by position."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ppd_runtime.models.stage.row_order import RowOrder

ATTENDED_ROWS = 64
"""Compiled passes attend to a multiple of so many rows of a cache; a mask hides those without a token."""


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values, `[1, num_key_value_heads, capacity, head_dim]` each, `length` of them valid.

    A layer with a sliding window stores every position too and hands out the newest `sliding_window - 1` and the
    tokens of the pass, as transformers' own cache does; so any layer can drop its newest entries at any time.

    In memory a token's entries lie together, `[rows, heads, head_dim]`, so that the first rows are a tensor like any
    other, whatever the capacity. All rows hold finite numbers: what a mask hides is multiplied by 0. The memory is the
    `index`-th part of `memory`, where its layers share one, and so is the order of their rows.
    """

    is_croppable = True
    attentions = 1
    """Attentions of the layer, each with keys and values of its own."""

    def __init__(
        self, capacity: int, sliding_window: int | None, memory: "LayersMemory | None" = None, index: int = 0
    ) -> None:
        super().__init__()
        self._memory, self._index = memory or LayersMemory(index + 1), index
        self.capacity = capacity
        self.sliding_window = sliding_window
        self.is_chunked = False
        """Whether a token sees only those of the newest `sliding_window` that are in its own chunk of the text."""
        self.length = 0
        self.rows: tuple[Tensor, ...] = ()
        """Keys and values as they lie in memory, `[rows, heads, head_dim]`, capacity rounded up."""
        self._first_rows: tuple[Tensor, Tensor] | None = None

    @property
    def order(self) -> RowOrder:
        """In which row each position lies."""
        return self._memory.order

    @property
    def is_sliding(self) -> bool:
        """Whether the layer attends to a window only."""
        return self.sliding_window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the shapes, dtype and device of the first entries."""
        size = whole_rows(self.capacity)
        self.rows = self._memory.part(self._index, size, key_states, value_states)
        self.keys, self.values = (rows[: self.capacity].transpose(0, 1)[None] for rows in self.rows)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the entries of a pass, `[1, heads, tokens, head_dim]`; the entries that the pass attends to."""
        start = self._visible_from(self.length)
        self.write(key_states, value_states)
        rows = self.order.rows(start, self.length)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def write(self, key_states: Tensor, value_states: Tensor) -> None:
        """Append entries without attending to them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.check_room(end)
        rows = self.order.rows(self.length, end)
        self.keys[:, :, rows], self.values[:, :, rows] = key_states, value_states
        self.length = end

    def next_rows(self, tokens: int = 1, extent: int = 0) -> tuple[Tensor, Tensor]:
        """Count more tokens, whose entries the caller writes: the first rows, `[rows, heads, head_dim]` each.

        There are as many as the next multiple of `ATTENDED_ROWS`: that depends on the newest token's position alone, or
        on the `extent` of rows behind the tokens before in which entries lie.
        """
        reach = self.length + max(tokens, extent)
        self.check_room(reach)
        self.length += tokens
        size = whole_rows(reach)
        if self._first_rows is None or self._first_rows[0].shape[0] != size:
            keys, values = self.rows
            self._first_rows = keys[:size], values[:size]
        return self._first_rows

    def check_room(self, tokens: int) -> None:
        """Raise IndexError where so many tokens do not fit."""
        if tokens > self.capacity:
            raise IndexError(f"a cache for {self.capacity} tokens cannot hold {tokens}")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the entries that a pass of `query_length` tokens attends to."""
        start = self._visible_from(self.length)
        return self.length + query_length - start, start

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.capacity

    def _visible_from(self, length: int) -> int:
        """The first entry that a pass after so many tokens attends to."""
        return 0 if self.sliding_window is None else max(length - self.sliding_window + 1, 0)


class SomeLayersCache(Cache):
    """Some layers of a cache, as a transformers cache whose layers have the numbers `numbers`.

    What the library asks of the first layer, such as how many tokens there are, is the first of these layers'.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], numbers: Sequence[int]) -> None:
        super().__init__(layers=list(layers))
        self._places = {number: place for place, number in enumerate(numbers)}
        self._attentions: int = getattr(self.layers[0], "attentions", 1) if layers else 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append to the layer that the model knows as `layer_idx`; if layers have two attentions, it counts these."""
        number, attention = divmod(layer_idx, self._attentions)
        return self.layers[self._places[number]].update(key_states, value_states, attention)

    def has(self, layer_idx: int) -> bool:
        """Whether the layer that the model knows as `layer_idx` is one of these."""
        return layer_idx in self._places

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Append index keys to the layer that the model knows as `layer_idx`, see `IndexedLayer`."""
        layer: Any = self.layers[self._places[layer_idx]]
        found: Tensor = layer.update_indexer(indexer_key_states)
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the layer that the model knows as `layer_idx`; where there is none, in the first of these.

        Between passes all hold as many; in a pass those that have run hold more.
        """
        return self.layers[self._places.get(layer_idx, 0)].get_seq_length()


class LayersMemory:
    """One tensor for the entries of all layers, so that a token's are copied at once."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.order = RowOrder()
        """Of a sequence that has all of it."""
        self.whole: Tensor | None = None
        """`[layers, 2, rows, heads, head_dim]`; None before the first layer asks, and where layers are not alike."""
        self._alike = True

    def part(self, index: int, size: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Zeroed rows for a layer whose entries look like `keys` and `values`, `[1, heads, tokens, head_dim]`."""
        shape = (size, keys.shape[1], keys.shape[3])
        if self.whole is None and self._alike and keys.shape == values.shape:
            self.whole = self._zeros(keys, (self._num_layers, 2, *shape))
        if self.whole is not None and (self.whole.shape[2:], self.whole.dtype) == (shape, keys.dtype):
            return self.whole[index, 0], self.whole[index, 1]
        self.whole, self._alike = None, False
        return self._zeros(keys, shape), self._zeros(values, (size, values.shape[1], values.shape[3]))

    def _zeros(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return like.new_zeros(shape)


class StageCache:
    """The entries of a stage's layers for one sequence of at most `capacity` tokens.

    Args:
        windows: each layer's, those before the stage's `first` layer too, of which nothing is stored.
        memory: of its rows; None: its own.
        moves: whether a sequence's rows have to follow each other, so that entries move; else their order does.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        capacity: int,
        first: int = 0,
        memory: "LayersMemory | None" = None,
        moves: bool = True,
    ) -> None:
        self.memory, self._first, self._moves = memory or LayersMemory(len(windows) - first), first, moves
        self.layers = [PreallocatedLayer(capacity, window, self.memory, i - first) for i, window in enumerate(windows)]
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._views: dict[tuple[int, ...], SomeLayersCache] = {}
        self.capacity = capacity
        """Tokens that fit."""

    def entry_shape(self, last: int) -> tuple[int, ...]:
        """Shape of one token's keys or values in any of the layers 0 to `last`, `(heads, head_dim)`; empty before any
        pass.

        Where they have different sizes, as in latent attention, the largest ones: the others are padded.
        """
        if (whole := self.memory.whole) is not None:
            return tuple(whole.shape[3:])
        if last not in self._shapes and all(layer.rows for layer in self.layers[:last]):
            shapes = [rows.shape[1:] for layer in self.layers[:last] for rows in layer.rows]
            self._shapes[last] = tuple(map(max, *shapes))
        return self._shapes.get(last, ())

    def view(self, numbers: Sequence[int]) -> SomeLayersCache:
        """The layers with these numbers, for forward passes that run no others; the same each time."""
        key = tuple(numbers)
        if key not in self._views:
            self._views[key] = SomeLayersCache([self.layers[number] for number in key], key)
        return self._views[key]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, drop the newer ones."""
        for layer in self.layers:
            layer.length = min(layer.length, length)

    @torch.inference_mode()
    def clear_behind(self, length: int) -> None:
        """Like `truncate`, but newer entries become zeros: a mask does not hide numbers that are not finite."""
        self.truncate(length)
        free = self.memory.order.rows(length, self.capacity)
        for rows in (rows for layer in self.layers for rows in layer.rows):
            rows[free] = 0

    def set_length(self, length: int) -> None:
        """Have the stage's layers hold so many tokens, whose entries lie in the first rows."""
        for layer in self.layers[self._first :]:
            layer.length = length

    @torch.inference_mode()
    def fill(self, generator: torch.Generator) -> None:
        """Random entries in all rows, to try passes with; layers of one shape have the same."""
        drawn: dict[tuple[int, ...], Tensor] = {}
        for place, rows in enumerate(rows for layer in self.layers for rows in layer.rows):
            kind = (place % 2, *rows.shape)
            if kind not in drawn:
                drawn[kind] = torch.randn(rows.shape, generator=generator, dtype=torch.float32)
            rows.copy_(drawn[kind])

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Have a token's entries lie at another position, which is free, in all of the stage's layers."""
        if not self._moves:
            self.memory.order.exchange(source, target)
        elif (whole := self.memory.whole) is not None:
            whole[:, :, target] = whole[:, :, source]
        else:
            for rows in (rows for layer in self.layers for rows in layer.rows):
                rows[target] = rows[source]

    @torch.inference_mode()
    def copy_rows(self, first: int, end: int) -> tuple[Tensor, ...]:
        """The entries of tokens `first` to `end` in the stage's layers, `[tokens, heads, head_dim]` each."""
        order = self.memory.order.rows(first, end)
        return tuple(rows[order].clone() for layer in self.layers for rows in layer.rows)

    @torch.inference_mode()
    def append_chunk(self, entries: Sequence[Tensor], states: Sequence[Any], tokens: int) -> None:
        """Append a chunk of so many tokens: the entries that `copy_rows` has given; there are no states after it."""
        layers = self.layers[self._first :]
        for layer, keys, values in zip(layers, entries[::2], entries[1::2], strict=True):
            layer.write(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])

    def states_after(self, length: int) -> tuple[Any, ...]:
        """What the last of the first `length` tokens left in each of the stage's layers beside entries: nothing."""
        return ()

    def keep_path(self, position: int, nodes: Sequence[int]) -> None:
        """Keep those entries from `position` on that lie `nodes` (ascending) behind it, and place them one after the
        other."""
        end = position + len(nodes)
        if nodes[-1] >= len(nodes) and not self._moves:
            self.memory.order.keep(position, nodes)
        elif nodes[-1] >= len(nodes):
            kept = [position + node for node in nodes]
            whole = self.memory.whole
            parts = [rows for layer in self.layers for rows in layer.rows] if whole is None else [whole]
            for rows in parts:
                rows[..., position:end, :, :] = rows[..., kept, :, :]
        self.truncate(end)

    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """A copy of the entries of the tokens `first` to `end` in layers 0 to `last` (both ends exclusive).

        `[tokens, last, 2, heads, head_dim]`; RuntimeError where a layer does not hold them all.
        """
        if any(layer.length < end for layer in self.layers[:last]):
            held = min(layer.length for layer in self.layers[:last])
            raise RuntimeError(f"entries {first} to {end} of {last} layers are asked for, and {held} tokens are held")
        order = self.memory.order.rows(first, end)
        if (whole := self.memory.whole) is not None:
            return whole[:last, :, order].permute(2, 0, 1, 3, 4).contiguous()
        heads, dim = self.entry_shape(last)
        rows = [_padded(rows[order], heads, dim) for layer in self.layers[:last] for rows in layer.rows]
        return torch.stack(rows, dim=1).view(end - first, last, 2, heads, dim)

    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append consecutive tokens' entries, each as `export_entries` gives it, to the layers they came from."""
        layers = self.layers[: entries[0].shape[0]]
        if self.memory.whole is not None and all(layer.is_initialized for layer in layers):
            self._import_at_once(layers, entries)
            return
        stacked = torch.stack(list(entries), dim=3)  # [layers, 2, heads, tokens, head_dim]
        for layer, (keys, values) in zip(layers, stacked.unbind(), strict=True):
            sizes = [rows.shape[1:] for rows in layer.rows] or [keys.shape[::2], values.shape[::2]]
            (heads, key_dim), (_, value_dim) = sizes
            layer.write(keys[None, :heads, :, :key_dim], values[None, :heads, :, :value_dim])

    def _import_at_once(self, layers: Sequence[PreallocatedLayer], entries: Sequence[Tensor]) -> None:
        first = layers[0].length
        end = first + len(entries)
        for layer in layers:
            if layer.length != first:
                raise RuntimeError(f"layers hold {first} and {layer.length} tokens: entries continue all or none")
            layer.check_room(end)
            layer.length = end
        assert self.memory.whole is not None
        self.memory.whole[: len(layers), :, self.memory.order.rows(first, end)] = torch.stack(list(entries), dim=2)


def _padded(rows: Tensor, heads: int, dim: int) -> Tensor:
    """Rows `[tokens, heads, head_dim]` with zeros up to so many heads and numbers."""
    missing = (0, dim - rows.shape[2], 0, heads - rows.shape[1])
    return torch.nn.functional.pad(rows, missing) if any(missing) else rows


def whole_rows(length: int) -> int:
    """The rows of a cache that a compiled pass attends to, where so many hold a token."""
    return -(-length // ATTENDED_ROWS) * ATTENDED_ROWS
