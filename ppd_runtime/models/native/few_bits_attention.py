"""Our own attention for the library's passes over a few tokens, in models with weights of few bits.

A matrix of few bits multiplies states rounded to 8 bits. PyTorch's attention rounds differently for several tokens than
for one, which would change numbers, and now and then a token.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ppd_runtime.models.native.attention import few_tokens_attention
from ppd_runtime.models.stage.grouped_attention import asks_for_its_name, bitwise_grouped_attention

FEW_BITS = "ppd_few_bits"
"""The attention's name in a model's configuration."""
_MOST_TOKENS = 128
"""For more tokens, as in a prompt, the library's is faster."""


def choose_few_bits_attention(model: PreTrainedModel) -> None:
    """Make a float32 model on a CPU use this attention, if it uses PyTorch's and its code does not check which one it
    is.
    """
    config: Any = model.config
    if config._attn_implementation == "sdpa" and not asks_for_its_name(type(model).__module__):
        AttentionInterface.register(FEW_BITS, few_bits_attention)
        AttentionMaskInterface.register(FEW_BITS, sdpa_mask)
        config._attn_implementation = FEW_BITS


def few_bits_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The library's attention, up to rounding. A token's bits do not depend on the tokens beside it.

    `query` is `[1, heads, tokens, dim]`, keys and values `[1, shared, rows, dim]`, the mask `[1, 1, tokens, rows]`.
    """
    tokens, rows = query.shape[2], key.shape[2]
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if tokens > _MOST_TOKENS or special or query.requires_grad or kwargs.get("dropout"):
        return bitwise_grouped_attention(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None:
        return few_tokens_attention(query, key, value, *_all_before(tokens, rows), scale, 0.0), None
    mask = attention_mask[0, 0, :, :rows]
    sees = mask if mask.dtype == torch.bool else mask > -1
    return few_tokens_attention(query, key, value, *_lists(sees), scale, 0.0), None


@lru_cache(maxsize=64)  # each layer of a pass asks for the same
def _all_before(tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """The `_lists` of the last `tokens`, each of which sees itself and all rows before it."""
    return _lists(torch.ones(tokens, rows, dtype=torch.bool).tril(rows - tokens))


def _lists(sees: Tensor) -> tuple[Tensor, Tensor]:
    """`where` and `lists` of tokens that see these rows, `[tokens, rows]`; see `few_tokens_attention`."""
    numbers = sees.sum(1)
    in_order = torch.argsort(sees.logical_not().to(torch.uint8), dim=1, stable=True)  # the rows that it sees come first
    lists = in_order[:, : int(numbers.max())].contiguous()
    return torch.stack([lists[:, 0], numbers - 1, torch.zeros_like(numbers)]), lists
