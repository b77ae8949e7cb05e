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
        attended, offset = layer.get_mask_sizes(len(self.depths))
        before = torch.arange(offset, layer.length) - layer.length
        places = torch.cat([before, self.depths])  # from where the tree's roots stand
        assert len(places) == attended
        sees = torch.cat([torch.ones(len(self.depths), len(before), dtype=torch.bool), self._sees], dim=1)
        if layer.sliding_window is not None:
            sees &= places > (self.depths - layer.sliding_window)[:, None]
        hidden = torch.zeros(sees.shape, dtype=model.dtype).masked_fill_(~sees, torch.finfo(model.dtype).min)
        return hidden[None, None].to(model.device)
