"""The library's attention on CPUs, for several tokens, without copies of the keys and values that heads share.

The library leaves grouped heads to PyTorch where there is no mask and repeats keys and values where there is one, since
a mask makes them slow on GPUs. On CPUs it does not: a verification of four tokens takes a tenth less time.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SHARED_HEADS = "ppd_shared_heads"
"""The attention's name in a model's configuration."""


def share_heads(model: PreTrainedModel) -> None:
    """Have a model on a CPU use this attention, if it uses PyTorch's."""
    config: Any = model.config
    if config._attn_implementation == "sdpa" and model.device.type == "cpu":
        AttentionInterface.register(SHARED_HEADS, shared_heads_attention)
        AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)
        config._attn_implementation = SHARED_HEADS


def shared_heads_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As the library's, to the bit; `query` is `[1, heads, tokens, dim]`, keys and values `[1, shared, rows, dim]`."""
    groups: int = getattr(module, "num_key_value_groups", 1)
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache"))
    if groups == 1 or attention_mask is None or query.shape[2] == 1 or special or kwargs.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
