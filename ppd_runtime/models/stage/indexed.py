"""Layers that choose the tokens which they attend to by an index with keys of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ppd_runtime.models.stage.caches import LayersMemory, PreallocatedLayer
from ppd_runtime.models.stage.decoder_parts import shallow_copy


class IndexedLayer(PreallocatedLayer):
    """Keys and values of a layer with one key/value head, whose index keeps a key of each token too.

    A token's index key lies behind its value in the same row, so it is moved, kept, dropped and shipped with it. It is
    stored in float32, which some models' keys have beside values in bfloat16: as the bits of two such numbers.

    Args:
        index_size: numbers of an index key.
    """

    def __init__(self, capacity: int, memory: LayersMemory, index: int, index_size: int) -> None:
        super().__init__(capacity, None, memory, index)
        self._index_size, self._indexed = index_size, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `PreallocatedLayer.update`; the tokens' index keys follow in `update_indexer`."""
        self._indexed = self.length
        keys, values = super().update(key_states, pad(value_states, (0, self._room(value_states))))
        return keys, values[..., : -self._room(values)]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Keep the index keys of the pass' next tokens, `[1, tokens, index_size]`; gives them and all before them."""
        keys, start = self.values[:, 0, :, -self._room(self.values) :], self._indexed
        self._indexed += indexer_key_states.shape[1]
        keys[:, self.order.rows(start, self._indexed)] = indexer_key_states.float().contiguous().view(keys.dtype)
        found = keys[:, self.order.rows(0, self._indexed)].contiguous().view(torch.float32)
        return found.to(indexer_key_states.dtype)

    def _room(self, values: Tensor) -> int:
        """Numbers of the values' format that an index key takes."""
        return self._index_size * 4 // values.element_size()


class _ChoosesAlone(nn.Module):
    """An index of the library's that chooses for each token of a pass as for one that runs alone.

    Many scores are exactly 0. Which of equal scores `topk` takes depends on how many there are, also of those that the
    mask hides.
    """

    def __init__(self, index: nn.Module, in_prompt: Callable[[], bool]) -> None:
        super().__init__()
        self.index, self._in_prompt = index, in_prompt

    def forward(
        self, states: Tensor, queries: Tensor, places: tuple[Tensor, Tensor], mask: Tensor, *others: Any, **cache: Any
    ) -> Tensor:
        """The places of the chosen tokens, `[1, tokens, chosen]`; of fewer tokens the last one again."""
        tokens, seen = states.shape[1], mask.shape[2]
        if tokens == 1 or self._in_prompt():
            return self.index(states, queries, places, mask, *others, **cache)
        found = list[Tensor]()
        for i in range(tokens):
            of_one = [part[:, i : i + 1] for part in (states, queries, *places, mask[..., : seen - tokens + 1 + i])]
            found.append(self.index(*of_one[:2], tuple(of_one[2:4]), of_one[4], *others, **cache))
        most = found[-1].shape[2]
        return torch.cat([torch.cat([one, one[..., -1:].expand(-1, -1, most - one.shape[2])], -1) for one in found], 1)


def choosing_alone(layer: nn.Module, in_prompt: Callable[[], bool]) -> nn.Module:
    """The layer, whose index, if it has one, chooses for each token as if it ran alone, but in a prompt's passes."""
    attention: Any = getattr(layer, "self_attn", None)
    if getattr(attention, "indexer", None) is None:
        return layer
    twin: Any = shallow_copy(layer)
    twin.self_attn = shallow_copy(attention)
    twin.self_attn.indexer = _ChoosesAlone(attention.indexer, in_prompt)
    whole: nn.Module = twin
    return whole
