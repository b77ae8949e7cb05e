"""Chooses the attention of a model's stage. CPUs: the library's for several tokens, without copies of keys and values
that heads share, and with masks made once a pass. GPUs: any of PyTorch's except cuDNN's (`arithmetic`).

Without a mask the library leaves grouped heads to PyTorch; with one it repeats keys and values, since masks make
grouped heads slow on GPUs. On CPUs they do not: a verification of four tokens takes a tenth less time.
"""

import inspect
import re
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppd_runtime.models.stage.arithmetic import settle_arithmetic

SHARED_HEADS = "ppd_shared_heads"
"""The attention's name in a model's configuration."""


def choose_attention(model: PreTrainedModel) -> None:
    """Make a model on a CPU use this attention, if it uses PyTorch's and its code does not check which one it is;
    settle this process' arithmetic for the model's device."""
    settle_arithmetic(model.device)
    config: Any = model.config
    if config._attn_implementation != "sdpa" or model.device.type != "cpu":
        return
    if keeps_the_bits(model.dtype) and not asks_for_its_name(type(model).__module__):
        AttentionInterface.register(SHARED_HEADS, bitwise_grouped_attention)
        AttentionMaskInterface.register(SHARED_HEADS, additive_mask)
        config._attn_implementation = SHARED_HEADS


@lru_cache
def keeps_the_bits(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products over shared heads give the bits of those over copies; it need not."""
    query, key, value = (
        torch.linspace(-2, end, heads * rows * 32, device="cpu").sin().to(dtype).view(1, heads, rows, 32)
        for heads, rows, end in ((4, 3, 2), (2, 70, 3), (2, 70, 50))
    )
    mask = torch.ones(3, 70, dtype=torch.bool, device="cpu").tril(67)
    shared = scaled_dot_product_attention(query, key, value, attn_mask=_added(mask, dtype), enable_gqa=True)
    keys, values = (part.repeat_interleave(2, dim=1) for part in (key, value))
    return torch.equal(shared, scaled_dot_product_attention(query, keys, values, attn_mask=mask))


@lru_cache
def asks_for_its_name(module: str) -> bool:
    """Whether a model's code acts differently for an attention that it does not know."""
    return bool(re.search(r"_attn_implementation\s*(==|!=|in\b|not in\b)", inspect.getsource(sys.modules[module])))


def additive_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """The library's mask, made additive once a pass instead of in each layer."""
    mask = sdpa_mask(*args, dtype=dtype, **kwargs)
    return None if mask is None else _added(mask, dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def bitwise_grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The library's attention, bit for bit. `query` is `[1, heads, tokens, dim]`, keys and values `[1, shared, rows,
    dim]`."""
    groups: int = getattr(module, "num_key_value_groups", 1)
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if groups == 1 or attention_mask is None or query.shape[2] == 1 or special or kwargs.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
