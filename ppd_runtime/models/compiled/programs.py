"""What is exported of a model: one layer over caches for one token or several, and the head; and their attention."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ppd_runtime.models.native.attention import few_tokens_attention
from ppd_runtime.models.stage.caches import SomeLayersCache
from ppd_runtime.models.stage.decoder_parts import CACHE_ARGUMENT


class _Texts(NamedTuple):
    """What `few_tokens_attention` takes for the tokens of a layer under export: the library's code passes on only
    masks."""

    mask: Tensor
    """The mask that the library is given and nobody reads."""
    where: Tensor
    lists: Tensor
    window: int
    found: list[nn.Module]
    """Attention of our own that took them."""


_texts: ContextVar[_Texts | None] = ContextVar("texts", default=None)


class MaskIsReadError(Exception):
    """A layer has attention that is not our own."""


class _Unread(TorchFunctionMode):
    """Refuses to compute anything of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asks = getattr(function, "__name__", "") == "__get__"  # for a shape or a dtype
        given = (*args, *(kwargs or {}).values())
        parts = (part for each in given for part in (each if isinstance(each, list | tuple) else [each]))
        if not asks and any(part is self._tensor for part in parts):
            raise MaskIsReadError
        return function(*args, **(kwargs or {}))


class FewTokensHead(nn.Module):
    """Final norm, head and what the model adds to it, as they are exported."""

    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self._piece = [piece]  # in a list: its weights are no constants

    def forward(self, hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """`[1, tokens, vocab_size]` logits of hidden states `[1, tokens, hidden_size]`."""
        feed = {"inputs_embeds": hidden, "use_cache": False}
        return torch.func.functional_call(self._piece[0], weights, (), feed).logits


class OneTokenLayer(nn.Module):
    """One layer of the library's decoder over preallocated caches, as it is exported for one token."""

    def __init__(self, piece: nn.Module, index: int, window: int | None) -> None:
        super().__init__()
        self._piece, self._index, self._window = [piece], index, window  # in a list: its weights are no constants

    def forward(
        self, hidden: Tensor, position: Tensor, keys: Tensor, values: Tensor, weights: dict[str, Tensor]
    ) -> Tensor:
        """`[1, 1, hidden_size]` after the layer; caches are `[rows, heads, dim]`, the position is `[1]`."""
        rows = torch.arange(keys.shape[0], device=hidden.device)
        hides = rows > position if self._window is None else (rows > position) | (rows <= position - self._window)
        mask = torch.where(hides, torch.finfo(hidden.dtype).min, 0.0).to(hidden.dtype).view(1, 1, 1, -1)
        cache = _FewTokensCache(keys, values, position, position, self._window)
        return self._behind(hidden, cache, weights, position[None], mask)

    def _behind(
        self, hidden: Tensor, rows: "_FewTokensCache", weights: dict[str, Tensor], places: Tensor, mask: Tensor
    ) -> Tensor:
        cache: Cache = SomeLayersCache([rows], [self._index])
        feed = {"inputs_embeds": hidden, "use_cache": True, CACHE_ARGUMENT: cache}
        feed |= {"position_ids": places, "attention_mask": mask}
        return torch.func.functional_call(self._piece[0], weights, (), feed).last_hidden_state


class SeveralTokensLayer(OneTokenLayer):
    """A layer for several tokens, whose rows, places and mask come from outside."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        own_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        mask: Tensor,
        weights: dict[str, Tensor],
    ) -> Tensor:
        """Run the layer over `[1, tokens, hidden_size]`. Entries go into the tokens' `own_rows`, `[tokens]`; `places`
        are `[1, tokens]`, the additive mask is `[1, 1, tokens, rows]`."""
        cache = _FewTokensCache(keys, values, own_rows, places[0, :1], self._window)
        return self._behind(hidden, cache, weights, places, mask)


class ListedTokensLayer(OneTokenLayer):
    """A layer for one token or several, with our own attention to listed rows."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        where: Tensor,
        keys: Tensor,
        values: Tensor,
        lists: Tensor,
        weights: dict[str, Tensor],
    ) -> Tensor:
        """Run the layer over `[1, tokens, hidden_size]`; `where` and `lists` are those of `few_tokens_attention`.

        Raises:
            MaskIsReadError: where the layer has other attention.
        """
        mask = hidden.new_zeros(1, 1, hidden.shape[1], keys.shape[0])
        cache = _FewTokensCache(keys, values, where[0], where[1, :1], self._window)
        texts = _Texts(mask, where, lists, self._window or 0, [])
        before = _texts.set(texts)
        try:
            with _Unread(mask):
                states = self._behind(hidden, cache, weights, where[1:2], mask)
        finally:
            _texts.reset(before)
        if not texts.found:
            raise MaskIsReadError
        return states


class AttentionlessLayer(nn.Module):
    """A layer without attention, which has no caches."""

    def __init__(self, piece: nn.Module) -> None:
        super().__init__()
        self._piece = [piece]

    def forward(self, hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """`[1, 1, hidden_size]` after the layer."""
        feed = {"inputs_embeds": hidden, "use_cache": False}
        return torch.func.functional_call(self._piece[0], weights, (), feed).last_hidden_state


class _FewTokensCache(CacheLayerMixin):
    """Writes entries in place into rows known only when it runs; all rows are there to be attended to."""

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, own_rows: Tensor, position: Tensor, window: int | None) -> None:
        super().__init__()
        self.keys, self.values, self._own_rows, self._position = keys, values, own_rows, position
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[1, heads, tokens, dim]` each; all rows as `[1, heads, rows, dim]`, for the mask to choose from."""
        for rows, states in ((self.keys, key_states), (self.values, value_states)):
            rows.index_copy_(0, self._own_rows, states[0].transpose(0, 1))
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All rows, from the first."""
        return self.keys.shape[0], 0

    def get_seq_length(self) -> Tensor:
        """The position, a tensor as in the library's own static cache."""
        return self._position[0]

    def get_max_length(self) -> int:
        """Rows that there are."""
        return self.keys.shape[0]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention without copies of the key/value heads that queries share.

    Its own does the same for one token (`pack_gqa`), but not in code that is being exported. `query` is
    `[1, heads, tokens, dim]`, the mask `[1, 1, tokens, rows]`.
    """
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    _, heads, tokens, dim = query.shape
    shared = key.shape[1]
    if not isinstance(tokens, int) and shared < heads and _is_on_gpu(query) and attention_mask is not None:
        return _attention_of_groups(query, key, value, attention_mask, scaling), None
    if not isinstance(tokens, int):  # any number of them: such a regrouping cannot be exported
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None  # as the library's: some models take views of it
    groups = query.reshape(1, shared, -1, dim)
    if tokens > 1 and attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads // shared, 1)
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(1, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _attention_of_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """`[1, tokens, heads, dim]` like the library's: the heads that share keys and values are heads of one sequence.

    All of them read the same keys, by a stride of 0. With `enable_gqa` and a mask PyTorch's fast kernels for GPUs do
    not serve: its plain attention repeats keys and values for each head, in float32.
    """
    shared = key.shape[1]
    queries = query[0].unflatten(0, (shared, query.shape[1] // shared))
    keys, values = (part.transpose(0, 1).expand(-1, queries.shape[1], -1, -1) for part in (key, value))
    output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    return output.permute(2, 0, 1, 3).flatten(1, 2)[None].contiguous()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by our own code, in a `ListedTokensLayer`."""
    texts = _texts.get()
    if texts is None:
        return grouped_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    unusual = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if unusual or attention_mask is not texts.mask:
        raise MaskIsReadError
    texts.found.append(module)
    scale, window = query.shape[-1] ** -0.5 if scaling is None else scaling, float(texts.window)
    return few_tokens_attention.in_graphs()(query, key, value, texts.where, texts.lists, scale, window), None
