"""Attention of a pass whose rows follow different texts: each row's is computed by itself.

Here in the library's own code: what the rows see is gathered, one row's entries behind those of another, and each row
attends to its own alone. It has the bits of its own pass, whatever is beside it. `SlotRows` gathers nothing. In other
passes the library's attention runs as it is.
"""

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ppd_runtime.models.stage.caches import PreallocatedLayer
from ppd_runtime.models.stage.grouped_attention import SHARED_HEADS, asks_for_its_name
from ppd_runtime.models.stage.trees import TextRows

ROWS = 8
"""Rows of a padded pass, those without a token among them."""
_PREFIX = "ppd_rows_"


class RunningRows:
    """The rows of a pass that is running.

    Args:
        texts: each with its rows; together at most `ROWS`.
        device: the caches'.
    """

    def __init__(self, texts: Sequence[TextRows], device: torch.device) -> None:
        self._texts, self._device, self.size = texts, device, sum(len(text.paths) for text in texts)
        self.lengths: list[int] = []
        """How many entries each row sees in the layer that has written last."""
        self._seen: dict[int | None, list[list[slice | Tensor]]] = {}
        self._own = [self._here(text.own_rows()) for text in texts]

    def _here(self, index: slice | Tensor) -> slice | Tensor:
        return index if isinstance(index, slice) else index.to(self._device)

    def append(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' entries, `[1, heads, ROWS, head_dim]` each, into layer `number` of their texts' caches.

        Returns the entries that the rows see, one row's behind those of another, `[1, heads, entries, head_dim]` each.
        """
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.lengths, start = [], 0
        for place, (text, own) in enumerate(zip(self._texts, self._own, strict=True)):
            layer, end = text.cache.layers[number], start + len(text.paths)
            _write(layer, own, keys[:, :, start:end], values[:, :, start:end])
            for seen in self._seen_in(layer.sliding_window)[place]:
                for found, rows in zip(parts, layer.rows, strict=True):
                    found.append(rows[seen] if isinstance(seen, slice) else rows.index_select(0, seen))
                self.lengths.append(len(parts[0][-1]))
            start = end
        of_keys, of_values = (found[0] if len(found) == 1 else torch.cat(found) for found in parts)
        return of_keys.transpose(0, 1)[None], of_values.transpose(0, 1)[None]

    def attend(
        self,
        compute: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of queries `[1, heads, ROWS, dim]` to what `append` has given, `[1, ROWS, heads, value_dim]`.

        `compute` is the library's attention; rows without a token have zeros.
        """
        keys, values, found = key.split(self.lengths, dim=2), value.split(self.lengths, dim=2), list[Tensor]()
        for i, (of_row, to) in enumerate(zip(keys, values, strict=True)):
            found.append(compute(module, query[:, :, i : i + 1], of_row, to, None, **kwargs)[0])
        missing = found[0].new_zeros(1, query.shape[2] - len(found), *found[0].shape[2:])
        return torch.cat([*found, missing], dim=1), None

    def _seen_in(self, window: int | None) -> list[list[slice | Tensor]]:
        """What each row of each text sees in layers with such a window."""
        if window not in self._seen:
            self._seen[window] = [[self._here(text.seen(path, window)) for path in text.paths] for text in self._texts]
        return self._seen[window]


def _write(layer: PreallocatedLayer, own: slice | Tensor, keys: Tensor, values: Tensor) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    layer.check_room(own.stop if isinstance(own, slice) else 1 + int(own.max()))
    layer.keys[:, :, own], layer.values[:, :, own] = keys, values


class Rows(Protocol):
    """The rows of a pass that is running: `RunningRows`, or `SlotRows`."""

    size: int
    """Rows with a token, or all."""

    def append(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' entries in layer `number`; what `attend` is given."""

    def attend(
        self,
        compute: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """The attention of the layer that has written last."""


_running: ContextVar[Rows | None] = ContextVar("rows", default=None)


def with_rows(rows: Rows, run: Callable[[], Tensor]) -> Tensor:
    """Run a pass over these rows."""
    before = _running.set(rows)
    try:
        return run()
    finally:
        _running.reset(before)


class RowsLayer(CacheLayerMixin):
    """A layer's cache in a pass over several texts' rows."""

    is_sliding = False
    is_compileable = False

    def __init__(self, number: int, rows: Rows) -> None:
        super().__init__()
        self._number, self._rows, self.is_initialized = number, rows, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `RunningRows.append`."""
        return self._rows.append(self._number, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The rows' own entries: there is no mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: the rows' positions are given."""
        return 0

    def get_max_length(self) -> int:
        """No bound: the texts' caches have theirs."""
        return -1


class RowByRow(nn.Module):
    """A part of a layer that mixes a pass' rows, such as one with experts: here each row runs by itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The part's output; of rows without a token, zeros in place of states."""
        if (rows := _running.get()) is None:
            return self.part(hidden, *args, **kwargs)
        found = [self.part(hidden[:, i : i + 1], *args, **kwargs) for i in range(rows.size)]
        states = [one[0] if isinstance(one, tuple) else one for one in found]
        padded = torch.cat([*states, hidden.new_zeros(1, hidden.shape[1] - rows.size, hidden.shape[2])], dim=1)
        return (padded, *found[0][1:]) if isinstance(found[0], tuple) else padded


def mixes_rows(part: nn.Module) -> bool:
    """Whether a part of a layer has experts: how many rows an expert gets depends on what the other rows chose."""
    stacked = any(each.dim() > (1 if each.dtype == torch.uint8 else 2) for each in part.parameters())
    return stacked or any("Expert" in type(module).__name__ for module in part.modules())


def usual_attention(model: PreTrainedModel) -> str:
    """The name of a model's attention in other passes than those over rows."""
    return (model.config._attn_implementation or "").removeprefix(_PREFIX)


def can_attend_by_row(model: PreTrainedModel) -> bool:
    """Whether a model's attention can be computed row by row, in code that does not ask for its name."""
    known = usual_attention(model) in ("sdpa", SHARED_HEADS, "eager")
    return known and not asks_for_its_name(type(model).__module__)


def attend_by_row(model: PreTrainedModel) -> None:
    """Have a model compute its attention row by row in passes over rows, and as before in all others."""
    config: Any = model.config
    if not (usual := config._attn_implementation).startswith(_PREFIX):
        AttentionInterface.register(_PREFIX + usual, _by_row(usual))
        AttentionMaskInterface.register(_PREFIX + usual, _no_mask_of_rows(usual))
        config._attn_implementation = _PREFIX + usual


def _by_row(usual: str) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of queries `[1, heads, tokens, dim]`, `[1, tokens, heads, value_dim]`."""
        compute = attention_of(module, usual)
        if (rows := _running.get()) is None:
            return compute(module, query, key, value, attention_mask, **kwargs)
        return rows.attend(compute, module, query, key, value, **kwargs)

    return attend


def attention_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The library's attention of this name for a module."""
    eager: Any = sys.modules[type(module).__module__]
    return eager.eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def _no_mask_of_rows(usual: str) -> Callable[..., Tensor | None]:
    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _running.get() else ALL_MASK_ATTENTION_FUNCTIONS[usual](*args, **kwargs)

    return mask
