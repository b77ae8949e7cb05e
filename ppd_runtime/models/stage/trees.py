"""Attention within a tree of tokens in one pass: each token sees its ancestors, and no other branch."""

import threading
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache, wraps
from itertools import chain, takewhile
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import PreallocatedLayer, StageCache
from ppd_runtime.models.stage.row_order import RowOrder

_Shape = TypeVar("_Shape", bound=Hashable)


class TokenTree:
    """Tokens that run together, each at the end of a path behind one text.

    Args:
        paths: each token's path: the rows of its ancestors and then its own, counted from the text's end. Rows that end
            no path have run before.
    """

    def __init__(self, paths: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.paths, self._device, self.size = paths, device, len(paths)
        self.extent = 1 + max(map(max, paths))
        """Rows after the text, up to the last one that a token sees."""
        self.is_chain = all(path == tuple(range(i + 1)) for i, path in enumerate(paths))
        self.comes_again = self.is_chain or all(path == (i,) for i, path in enumerate(paths))
        """Whether it is a chain, or candidates of one position."""
        deepest = max(map(len, paths))
        in_place = takewhile(lambda i: all(path[i] == i for path in paths if len(path) > i), range(deepest - 1))
        first = sum(1 for _ in in_place)
        tails = ([*path[first:], *path[-1:] * (deepest - max(first, len(path)))] for path in paths)
        of_tokens = [path[-1] for path in paths], [len(path) - 1 for path in paths]
        self._numbers = array("q", chain(*of_tokens, *tails))
        (at, _), step = self._numbers.buffer_info(), self.size * self._numbers.itemsize
        self.memory = at, at + step, at + 2 * step, self.size, deepest - first
        """Addresses of rows, depths and tails, its size, a tail's length: `Tree` in native/passes.h begins so."""
        self._ahead: dict[int, Tensor] = {}
        self._scales: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    @cached_property
    def rows(self) -> Tensor:
        """`[tokens]`: where each token's entries go, counted from the text's end on."""
        return torch.tensor([path[-1] for path in self.paths], device=self._device)

    @cached_property
    def depths(self) -> Tensor:
        """`[tokens]`: tokens between each and the text before the tree."""
        return torch.tensor([len(path) - 1 for path in self.paths], device=self._device)

    def part(self, start: int, end: int) -> "TokenTree":
        """Some of the tokens, which run after those before them."""
        return tree_of(tuple(self.paths[start:end]), self._device)

    def lists(self, position: int) -> Tensor:
        """`[tokens, positions]`: the rows that each token sees: those of the text, up to the tree at `position`, and
        its path; after the path's end, any rows.
        """
        deepest = max(map(len, self.paths))
        paths = torch.tensor([[*path, *path[-1:] * (deepest - len(path))] for path in self.paths], device=self._device)
        text = torch.arange(position, device=self._device).expand(self.size, -1)
        return torch.cat([text, position + paths], dim=1)

    @cached_property
    def _sees(self) -> tuple[Tensor, Tensor]:
        """Whether a token sees a row, `[tokens, extent]`, and the depth of each row's token, `[extent]`."""
        sees = torch.zeros(self.size, self.extent, dtype=torch.bool)
        depths = torch.zeros(self.extent, dtype=torch.int64)
        for token, path in enumerate(map(list, self.paths)):
            sees[token, path], depths[path] = True, torch.arange(len(path))
        return sees.to(self._device), depths.to(self._device)

    def masks(self, layers: Mapping[int, PreallocatedLayer], dtype: torch.dtype) -> dict[int, Tensor]:
        """Additive masks of the layers, `[1, 1, tokens, attended]`, by their numbers in `layers`.

        `layers` are the caches, each before the pass.
        """
        made: dict[tuple[int | None, bool, int], Tensor] = {}
        keys = {number: (layer.sliding_window, layer.is_chunked, layer.length) for number, layer in layers.items()}
        for number, key in keys.items():
            if key not in made:
                made[key] = self._mask(layers[number], dtype)
        return {number: made[key] for number, key in keys.items()}

    def _mask(self, layer: PreallocatedLayer, dtype: torch.dtype) -> Tensor:
        attended, _ = layer.get_mask_sizes(self.size)
        start = torch.tensor([layer.length], device=self.depths.device)
        hides = self._hides(start, layer.length + self.size, layer.sliding_window)
        if layer.is_chunked and layer.sliding_window:
            hides = hides | self._hides_earlier_chunks(layer.length, layer.sliding_window)
        return torch.where(hides[None, None, :, -attended:], *self._scale(dtype))

    def _hides_earlier_chunks(self, position: int, chunk: int) -> Tensor:
        """Which rows lie in another chunk of the text than each token, `[tokens, rows]`; the tree is at `position`."""
        _, depths = self._sees
        rows = torch.cat([torch.arange(position, device=depths.device), position + depths])[: position + self.size]
        return rows // chunk != ((position + self.depths) // chunk)[:, None]

    def mask(self, start: Tensor, rows: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What the tokens see of a cache's first rows: an additive mask, `[1, 1, tokens, rows]`.

        `start`, `[1]`, is where the text ends.
        """
        hides = self._hides_of_chain if self.is_chain else self._hides
        return torch.where(hides(start, rows, window), *self._scale(dtype))[None, None]

    def _hides_of_chain(self, start: Tensor, rows: int, window: int | None) -> Tensor:
        """`_hides` of a chain in one or two short operations: such a pass may take less time than all those of
        `_hides`."""
        size = 1 << (rows - 1).bit_length()  # one tensor for many lengths: the tree holds it for good
        if size not in self._ahead:
            self._ahead[size] = torch.arange(size, device=start.device) - self.depths[:, None]
        ahead = self._ahead[size][:, :rows]
        return ahead > start if window is None else (ahead > start) | (ahead <= start - window)

    def _hides(self, start: Tensor, rows: int, window: int | None) -> Tensor:
        """Which rows each token does not see, `[tokens, rows]`."""
        (sees, depths), place = self._sees, torch.arange(rows, device=start.device) - start
        row = place.clamp(0, self.extent - 1)
        within = place == row
        hidden = torch.where(within, ~sees[:, row], place > 0)
        if window is None:
            return hidden
        return hidden | (torch.where(within, depths[row], place) <= self.depths[:, None] - window)

    def _scale(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What a mask adds to hidden and to visible scores."""
        if dtype not in self._scales:
            lowest = torch.finfo(dtype).min
            self._scales[dtype] = (self.depths.new_tensor(lowest, dtype=dtype), self.depths.new_tensor(0, dtype=dtype))
        return self._scales[dtype]


class PlacedTree(NamedTuple):
    """A tree after one of several texts, each with its own rows in one cache."""

    tree: TokenTree
    position: int
    """Its position: tokens of the text before it."""
    first_row: int
    """Its text's first row."""
    order: RowOrder
    """Which row each position is in."""

    @property
    def reach(self) -> int:
        """The rows up to the last one that it sees."""
        return self.first_row + max(self.position + self.tree.extent, self.order.extent)


class TextRows(NamedTuple):
    """Tokens after one of several texts, each with a cache of its own whose first rows are those of its positions."""

    cache: StageCache
    kept: int
    """Tokens of the text before them."""
    paths: Sequence[tuple[int, ...]]
    """As those of a `TokenTree`."""

    def own_rows(self) -> slice | Tensor:
        """The cache's rows for the tokens' own entries."""
        return _index([self.kept + path[-1] for path in self.paths])

    def seen(self, path: Sequence[int], window: int | None) -> slice | Tensor:
        """The cache's rows that the token at a path's end sees, itself the last."""
        end, reach = self.kept + len(path), next((i for i, row in enumerate(path) if row != i), len(path))
        start = 0 if window is None else max(end - window, 0)
        if reach == len(path):
            return slice(start, end)
        return _index([*range(self.kept), *(self.kept + row for row in path)][start:])


def _index(rows: list[int]) -> slice | Tensor:
    """An index of these rows; where possible a slice, whose tensors are views."""
    follows = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[-1] + 1) if follows else torch.tensor(rows)


Part = tuple[list[int] | Tensor, int, TokenTree | Sequence[PlacedTree] | Sequence[TextRows] | None]
"""Tokens that run together in a pass: ids, or hidden states `[1, tokens, hidden_size]`; the length of the text before
them; and their tree, which needs compiled code or padded passes, or None for one token. With several texts in a row the
length is 0."""


def _made_once(make: Callable[[_Shape, torch.device], TokenTree]) -> Callable[[_Shape, torch.device], TokenTree]:
    """Passes of one shape share a tree. On a GPU each thread has its own, made on its own streams."""
    made = lru_cache(maxsize=256)(lambda shape, device, _thread: make(shape, device))

    @wraps(make)
    def once(shape: _Shape, device: torch.device) -> TokenTree:
        return made(shape, device, threading.get_ident() if device.type == "cuda" else 0)

    return once


@_made_once
def tree_of(paths: tuple[tuple[int, ...], ...], device: torch.device) -> TokenTree:
    """The tree, made once for passes that look alike."""
    return TokenTree(paths, device)


@_made_once
def token_tree(parents: tuple[int, ...], device: torch.device) -> TokenTree:
    """Tokens in consecutive rows, each with its parent, which comes before it, or -1."""
    paths: list[tuple[int, ...]] = []
    for token, parent in enumerate(parents):
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return tree_of(tuple(paths), device)


@_made_once
def chain_of(tokens: int, device: torch.device) -> TokenTree:
    """A chain of `tokens` tokens."""
    return token_tree(tuple(range(-1, tokens - 1)), device)
