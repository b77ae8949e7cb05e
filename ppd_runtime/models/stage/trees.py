"""Attention within a tree of tokens that is run in one pass: each sees those it stands behind, and no other branch."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import PreallocatedLayer


class TokenTree:
    """Who stands behind whom: `parents` has each token's parent, which comes before it, or -1."""

    def __init__(self, parents: Sequence[int], device: torch.device) -> None:
        behind: list[list[int]] = []
        for node, parent in enumerate(parents):
            behind.append([*behind[parent], node] if parent >= 0 else [node])
        sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, path in enumerate(behind):
            sees[node, path] = True
        self.parents, self.sees = tuple(parents), sees.to(device)
        """`sees`, `[tokens, tokens]`: whether one (row) sees another."""
        self.depths = torch.tensor([len(path) - 1 for path in behind], device=device)
        """`[tokens]`: tokens between each and the text before the tree."""
        self.is_chain = self.parents == tuple(range(-1, len(parents) - 1))
        self.memory = self.depths.data_ptr(), self.sees.data_ptr()
        """Where `depths` and `sees` are."""
        self._ahead: dict[int, Tensor] = {}
        self._scales: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def masks(self, layers: Mapping[int, PreallocatedLayer], dtype: torch.dtype) -> dict[int, Tensor]:
        """What each layer adds to its scores, `[1, 1, tokens, attended]`, by the numbers that `layers` has them by.

        `layers` are the caches, each before the pass.
        """
        made: dict[tuple[int | None, int], Tensor] = {}
        for layer in layers.values():
            if (key := (layer.sliding_window, layer.length)) not in made:
                made[key] = self._mask(layer, dtype)
        return {number: made[layer.sliding_window, layer.length] for number, layer in layers.items()}

    def _mask(self, layer: PreallocatedLayer, dtype: torch.dtype) -> Tensor:
        size = len(self.parents)
        attended, _ = layer.get_mask_sizes(size)
        start = torch.tensor([layer.length], device=self.depths.device)
        hides = self._hides(start, layer.length + size, layer.sliding_window)[None, None, :, -attended:]
        return torch.where(hides, *self._scale(dtype))

    def mask(self, start: Tensor, rows: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What the tokens see of a cache's first rows: an additive mask, `[1, 1, tokens, rows]`.

        `start`, `[1]`, is where the tree's roots stand; its tokens' entries are in the rows from there on.
        """
        hides = self._hides_of_chain if self.is_chain else self._hides
        return torch.where(hides(start, rows, window), *self._scale(dtype))[None, None]

    def _hides_of_chain(self, start: Tensor, rows: int, window: int | None) -> Tensor:
        """As `_hides`, in one or two short operations: such a pass may take less than all those of `_hides`."""
        if rows not in self._ahead:
            self._ahead[rows] = torch.arange(rows, device=start.device) - self.depths[:, None]
        ahead = self._ahead[rows]
        return ahead > start if window is None else (ahead > start) | (ahead <= start - window)

    def _hides(self, start: Tensor, rows: int, window: int | None) -> Tensor:
        """Which rows each token does not see, `[tokens, rows]`."""
        place, depths = torch.arange(rows, device=start.device) - start, self.depths[:, None]
        node = place.clamp(0, len(self.parents) - 1)
        within = place == node
        hidden = torch.where(within, ~self.sees[:, node], place > 0)
        if window is None:
            return hidden
        return hidden | (torch.where(within, self.depths[node], place) <= depths - window)

    def _scale(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What a mask adds where something is hidden and where it is not."""
        if dtype not in self._scales:
            lowest = torch.finfo(dtype).min
            self._scales[dtype] = (self.depths.new_tensor(lowest, dtype=dtype), self.depths.new_tensor(0, dtype=dtype))
        return self._scales[dtype]


@lru_cache(maxsize=256)
def token_tree(parents: tuple[int, ...], device: torch.device) -> TokenTree:
    """The tree, made once for passes that look alike."""
    return TokenTree(parents, device)


@lru_cache(maxsize=256)
def chain_of(tokens: int, device: torch.device) -> TokenTree:
    """So many tokens, one behind the other."""
    return token_tree(tuple(range(-1, tokens - 1)), device)
