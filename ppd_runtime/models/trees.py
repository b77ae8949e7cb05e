"""Attention within a tree of tokens that is run in one pass: each sees those it stands behind, and no other branch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.kv_cache import PreallocatedLayer


class TokenTree:
    """Who stands behind whom: `parents` has each token's parent, which comes before it, or -1."""

    def __init__(self, parents: Sequence[int]) -> None:
        behind: list[list[int]] = []
        for node, parent in enumerate(parents):
            behind.append([*behind[parent], node] if parent >= 0 else [node])
        self.depths = torch.tensor([len(path) - 1 for path in behind])
        """`[tokens]`: tokens between each and the text before the tree."""
        self._sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
        for node, path in enumerate(behind):
            self._sees[node, path] = True

    def masks(self, layers: Sequence[PreallocatedLayer], model: PreTrainedModel) -> Tensor | dict[str, Tensor]:
        """The library's additive masks, `[1, 1, tokens, attended]`; by kind where layers have different windows.

        `layers` are the caches of all layers of `model`, each before the pass.
        """
        windows = [layer.sliding_window for layer in layers]
        masks = {window: self._mask(layers[windows.index(window)], model) for window in set(windows)}
        if len(masks) == 1:
            return masks[windows[0]]
        return {kind: masks[window] for kind, window in zip(model.config.layer_types, windows, strict=True)}

    def _mask(self, layer: PreallocatedLayer, model: PreTrainedModel) -> Tensor:
        attended, _ = layer.get_mask_sizes(len(self.depths))
        return self.mask(layer.length, layer.sliding_window, model)[..., -attended:]

    def mask(self, length: int, window: int | None, model: PreTrainedModel) -> Tensor:
        """The additive mask over all `length` tokens before the tree and its own, `[1, 1, tokens, all]`."""
        before = torch.arange(length) - length
        places = torch.cat([before, self.depths])  # from where the tree's roots stand
        sees = torch.cat([torch.ones(len(self.depths), length, dtype=torch.bool), self._sees], dim=1)
        if window is not None:
            sees &= places > (self.depths - window)[:, None]
        hidden = torch.zeros(sees.shape, dtype=model.dtype).masked_fill_(~sees, torch.finfo(model.dtype).min)
        return hidden[None, None].to(model.device)
