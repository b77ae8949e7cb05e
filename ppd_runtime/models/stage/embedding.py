"""The first layer's input for token ids, by the decoder's own code if it does more than look up."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.library_probe import embedding_scale
from ppd_runtime.models.stage.slicing import layer_range

_MOST_JOINED = 16  # rows of the table: to look up more at once takes less time
_MOST_VIEWS = 4096  # views of single rows: making one takes two operators


class Embedding:
    """A model's, on its device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, model.device
        self._entrance, self.scale = layer_range(model, 0, 0), embedding_scale(model)

    @cached_property
    def _one(self) -> Callable[[int], Tensor] | None:
        """Gives a token's row, `[1, 1, hidden_size]`, if that is all that the first layer needs."""
        look_up = _look_up(self._model.model.embed_tokens)
        return lru_cache(_MOST_VIEWS)(look_up) if look_up and not self.scale and self._only_looks_up else None

    @property
    def table(self) -> Tensor | None:
        """`[vocab_size, hidden_size]`, or packed, if a token's row is all that the first layer needs."""
        return self._model.model.embed_tokens.weight.detach() if self._one else None

    def __call__(self, token_ids: list[int]) -> Tensor:
        """`[1, tokens, hidden_size]`."""
        if self._one and len(token_ids) <= _MOST_JOINED and min(token_ids) >= 0:
            rows = [self._one(token) for token in token_ids]
            return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._device)
            return self._looked_up(ids) if self._only_looks_up else self._entered(ids)

    def _looked_up(self, ids: Tensor) -> Tensor:
        decoder = self._model.model
        return decoder.embed_tokens(ids) * getattr(decoder, self.scale) if self.scale else decoder.embed_tokens(ids)

    def _entered(self, ids: Tensor) -> Tensor:
        """The first layer's input for token ids, `[1, tokens]`, by the decoder's own code."""
        return self._entrance(input_ids=ids, use_cache=False).last_hidden_state

    @cached_property
    def _only_looks_up(self) -> bool:
        """Whether a token is only looked up and scaled before the first layer."""
        few = torch.arange(min(8, self._model.config.vocab_size), device=self._device)[None]
        with torch.inference_mode():
            return torch.equal(self._looked_up(few), self._entered(few))


def _look_up(table: Any) -> Callable[[int], Tensor] | None:
    """Gives a token's row, `[1, 1, hidden_size]`; None for an embedding that does more than look up."""
    if type(table) is nn.Embedding and table.max_norm is None:
        return lambda token: table.weight.detach()[token].view(1, 1, -1)
    return table.row_of if getattr(table, "only_looks_up", False) else None
