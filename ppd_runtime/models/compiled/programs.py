"""What is exported of a model: one layer over caches for one token or several, and the head; and their attention."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ppd_runtime.models.native.attention import few_tokens_attention
from ppd_runtime.models.stage.caches import SomeLayersCache

_texts: ContextVar[tuple[Tensor, Tensor]] = ContextVar("texts")
"""Of the tokens of a layer that is being exported, places and tails as `few_tokens_attention` takes them: the library's
code hands on masks, and nothing else."""


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
        return self._behind(hidden, cache, weights, position[None], mask, position[None])

    def _behind(
        self,
        hidden: Tensor,
        rows: "_FewTokensCache",
        weights: dict[str, Tensor],
        places: Tensor,
        mask: Tensor,
        tails: Tensor,
    ) -> Tensor:
        cache: Cache = SomeLayersCache([rows], [self._index])
        feed = {"inputs_embeds": hidden, "use_cache": True, "past_key_values": cache}
        feed |= {"position_ids": places, "attention_mask": mask}
        before = _texts.set((places, tails))
        try:
            return torch.func.functional_call(self._piece[0], weights, (), feed).last_hidden_state
        finally:
            _texts.reset(before)


class SeveralTokensLayer(OneTokenLayer):
    """The same for several tokens, whose rows, places and mask come from outside."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        own_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        mask: Tensor,
        tails: Tensor,
        weights: dict[str, Tensor],
    ) -> Tensor:
        """As before, `[1, tokens, hidden_size]`; the tokens' entries go into their `own_rows`, `[tokens]`; `places` are
        `[1, tokens]`, the additive mask is `[1, 1, tokens, rows]`, `tails` are as `few_tokens_attention` takes them.
        """
        cache = _FewTokensCache(keys, values, own_rows, places[0, :1], self._window)
        return self._behind(hidden, cache, weights, places, mask, tails)


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
    if not isinstance(tokens, int):  # any number of them: such a regrouping cannot be exported
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    groups = query.reshape(1, key.shape[1], -1, dim)
    if tokens > 1 and attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, heads // key.shape[1], 1)
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(1, heads, tokens, -1).transpose(1, 2), None


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same in code of our own, where there is a plain mask, of one head."""
    unusual = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if unusual or attention_mask is None or attention_mask.shape[:3] != (1, 1, query.shape[2]):
        return grouped_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return few_tokens_attention.in_graphs()(query, key, value, attention_mask, *_texts.get(), scale), None
