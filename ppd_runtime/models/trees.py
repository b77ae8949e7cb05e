"""Attention within a tree of tokens that is run in one pass: each sees those it stands behind, and no other branch."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.kv_cache import PreallocatedLayer


class TokenTree:
    """Who stands behind whom: `parents` has each token's parent, which comes before it, or -1."""

    def __init__(self, parents: Sequence[int], device: torch.device) -> None:
        behind: list[list[int]] = []
        for node, parent in enumerate(parents):
            behind.append([*behind[parent], node] if parent >= 0 else [node])
        sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, path in enumerate(behind):
            sees[node, path] = True
        self.parents, self._sees = tuple(parents), sees.to(device)
        self.depths = torch.tensor([len(path) - 1 for path in behind], device=device)
        """`[tokens]`: tokens between each and the text before the tree."""
        self.is_chain = self.parents == tuple(range(-1, len(parents) - 1))

    def masks(self, layers: Sequence[PreallocatedLayer], model: PreTrainedModel) -> Tensor | dict[str, Tensor]:
        """The library's additive masks, `[1, 1, tokens, attended]`; by kind where layers have different windows.

        `layers` are the caches of all layers of `model`, each before the pass.
        """
        windows = [layer.sliding_window for layer in layers]
        masks = {window: self._mask(layers[windows.index(window)], model.dtype) for window in set(windows)}
        if len(masks) == 1:
            return masks[windows[0]]
        return {kind: masks[window] for kind, window in zip(model.config.layer_types, windows, strict=True)}

    def _mask(self, layer: PreallocatedLayer, dtype: torch.dtype) -> Tensor:
        size = len(self.parents)
        attended, _ = layer.get_mask_sizes(size)
        start = torch.tensor([layer.length], device=self.depths.device)
        return self.mask(start, layer.length + size, layer.sliding_window, dtype)[..., -attended:]

    def mask(
        self, start: Tensor, rows: int, window: int | None, dtype: torch.dtype, own: slice = slice(None)
    ) -> Tensor:
        """What the tokens `own` see of a cache's first rows: an additive mask, `[1, 1, tokens, rows]`.

        `start`, `[1]`, is where the tree's roots stand; its tokens' entries are in the rows from there on.
        """
        place, depths = torch.arange(rows, device=start.device) - start, self.depths[own, None]
        if self.is_chain:
            seen = place <= depths
        else:
            node = place.clamp(0, len(self.parents) - 1)
            within = place == node
            seen = torch.where(within, self._sees[own][:, node], place < 0)
            place = torch.where(within, self.depths[node], place)
        if window is not None:
            seen &= place > depths - window
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return hidden.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


@lru_cache(maxsize=256)
def token_tree(parents: tuple[int, ...], device: torch.device) -> TokenTree:
    """The tree, made once for passes that look alike."""
    return TokenTree(parents, device)


def chain_of(tokens: int, device: torch.device) -> TokenTree:
    """So many tokens, one behind the other."""
    return token_tree(tuple(range(-1, tokens - 1)), device)
