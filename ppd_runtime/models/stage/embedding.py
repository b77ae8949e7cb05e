"""The first layer's input for token ids, by the decoder's own code if it does more than look up."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.decoder_parts import decoder_in, embedding_in, final_norm, shallow_copy
from ppd_runtime.models.stage.library_probe import embedding_scale
from ppd_runtime.models.stage.slicing import layer_range
from ppd_runtime.models.stage.wide import WideParts, argument_names, wide_parts

_MOST_JOINED = 16  # rows of the table: to look up more at once takes less time
_MOST_VIEWS = 4096  # views of single rows: making one takes two operators


def first_states(model: PreTrainedModel) -> "Embedding":
    """Gives what the first layer is given for token ids: rows of the embedding, or wide states."""
    parts = wide_parts(model.config)
    return _WideStates(model, parts) if parts else Embedding(model)


class Embedding:
    """A model's, on its device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, model.device
        self._entrance, self.scale = layer_range(model, 0, 0), embedding_scale(model)

    @property
    def _rows(self) -> Any:
        """The module that looks up."""
        return embedding_in(self._model)

    @cached_property
    def _one(self) -> Callable[[int], Tensor] | None:
        """Gives a token's row, `[1, 1, hidden_size]`, if that is all that the first layer needs."""
        look_up = _look_up(self._rows)
        return lru_cache(_MOST_VIEWS)(look_up) if look_up and not self.scale and self._only_looks_up else None

    @property
    def table(self) -> Tensor | None:
        """`[vocab_size, hidden_size]`, or packed, if a token's row is all that the first layer needs."""
        return self._rows.weight.detach() if self._one else None

    def __call__(self, token_ids: list[int]) -> Tensor:
        """`[1, tokens, hidden_size]`."""
        if self._one and len(token_ids) <= _MOST_JOINED and min(token_ids) >= 0:
            rows = [self._one(token) for token in token_ids]
            return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._device)
            return self._looked_up(ids) if self._only_looks_up else self._entered(ids)

    def _looked_up(self, ids: Tensor) -> Tensor:
        found: Tensor = self._rows(ids)
        return found * getattr(decoder_in(self._model), self.scale) if self.scale else found

    def _entered(self, ids: Tensor) -> Tensor:
        """The first layer's input for token ids, `[1, tokens]`, by the decoder's own code."""
        return self._entrance(input_ids=ids, use_cache=False).last_hidden_state

    @cached_property
    def _only_looks_up(self) -> bool:
        """Whether a token is only looked up and scaled before the first layer."""
        few = torch.arange(min(8, self._model.config.vocab_size), device=self._device)[None]
        with torch.inference_mode():
            return torch.equal(self._looked_up(few), self._entered(few))


class _WideStates(Embedding):
    """The states before the first layer, where they are wide: what the decoder tells its layers."""

    def __init__(self, model: PreTrainedModel, parts: WideParts) -> None:
        super().__init__(model)
        self._parts, self._told = parts, list[dict[str, Any]]()
        decoder = decoder_in(model)
        self._decoder = shallow_copy(decoder)
        names = argument_names(decoder.layers[0])
        self._decoder.layers = nn.ModuleList(_Told(names, self._told) for _ in range(parts.num_layers))
        setattr(self._decoder, final_norm(decoder), nn.Identity())

    @property
    def table(self) -> None:
        """There is no table (None): a token's row is not all that the first layer needs."""

    def __call__(self, token_ids: list[int]) -> Tensor:
        """`[1, tokens, numbers of a wide state]`."""
        with torch.inference_mode():
            self._decoder(input_ids=torch.tensor([token_ids], device=self._device), use_cache=False)
            inputs = [told["per_layer_input"] for told in self._told if self._parts.input_size]
            wide = self._parts.begin(self._told[0]["states"], inputs)
        self._told.clear()
        return wide


class _Told(nn.Module):
    """Stands in for a layer, and notes what it is told."""

    def __init__(self, names: list[str], told: list[dict[str, Any]]) -> None:
        super().__init__()
        self._names, self._notes = names, told

    def forward(self, states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        self._notes.append(dict(zip(self._names, arguments, strict=False)) | named | {"states": states})
        return states


def _look_up(table: Any) -> Callable[[int], Tensor] | None:
    """Gives a token's row, `[1, 1, hidden_size]`; None for an embedding that does more than look up."""
    if type(table) is nn.Embedding and table.max_norm is None:
        return lambda token: table.weight.detach()[token].view(1, 1, -1)
    return table.row_of if getattr(table, "only_looks_up", False) else None
