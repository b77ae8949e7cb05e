"""A layer range whose attention depends on the places in its cache: the tokens of a tree run path by path."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.indexed import choosing_alone
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.trees import token_tree


class PathRange(LayerRange):
    """A `LayerRange` with layers that attend in chunks of the text, or by an index; it has no compiled code.

    With chunks the library's code takes a token's position from how many tokens the cache holds; an index chooses among
    all of them. So two candidates of one position cannot run in one pass. Each token of a tree runs alone behind its
    path, and so has the bits of its own pass.
    """

    _in_prompt = False
    _moves = False

    def behind(self, part: PreTrainedModel) -> LayerRange:
        """See `LayerRange.behind`."""
        stage = type(self)(part, longest_in_chunks=self._longest_in_chunks)
        stage.recorder = self.recorder
        return stage

    def _call(self, *arguments: Any, **named: Any) -> Tensor:
        self._in_prompt = named.get("in_prompt", False)
        return super()._call(*arguments, **named)

    def _stand_in(self, number: int, layer: nn.Module) -> nn.Module:
        return super()._stand_in(number, choosing_alone(layer, lambda: self._in_prompt))

    def _run_tree(self, token_ids: list[int], parents: Sequence[int], position: int) -> Tensor:
        self.check_position(0, position)
        order, paths = self.cache.memory.order, token_tree(tuple(parents), self.device).paths
        found = list[Tensor]()
        for token, path in zip(token_ids, paths, strict=True):
            exchanges = [(position + place, position + row) for place, row in enumerate(path) if place != row]
            for exchange in exchanges:
                order.exchange(*exchange)
            self.cache.set_length(position + len(path) - 1)
            found.append(self._run_library(0, self.num_layers, [token], position + len(path) - 1))
            for exchange in reversed(exchanges):
                order.exchange(*exchange)
        self.cache.set_length(position + len(token_ids))
        return torch.cat(found, dim=1)
