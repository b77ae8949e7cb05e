"""Our own pass through stacked experts whose matrices have few bits: for a token only its experts' weights are read.

The library's modules keep their parameters, so this serves every family whose experts let the library choose how they
run. A parameter may be packed, uint8 `[experts, bytes]`, or floats.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ppd_runtime.models.native.library import Operator
from ppd_runtime.models.native.packing import packed_as

_FEW_BITS = "ppd_few_bits"


def _like_chosen(states: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return states.new_empty(chosen.numel(), packed_as(weights[0]).outputs)


chosen_product = Operator("chosen_linear", ("states", "weights", "chosen"), (), _like_chosen)
"""`[rows * each, outputs]` of states, `[rows, inputs]` in float32, and of those packed matrices, uint8
`[matrices, bytes]`, that each row's numbers in `chosen`, int64 `[rows, each]`, name. All are contiguous."""


def stacked_experts(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The matrices of all experts of a layer, `[experts, outputs, inputs]` or with both turned, by name, of the modules
    that let the library choose how experts run.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if _is_stacked(module)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def choose_few_bits_experts(model: PreTrainedModel) -> None:
    """Make a float32 model on a CPU run its experts this way."""
    ALL_EXPERTS_FUNCTIONS.register(_FEW_BITS, few_bits_experts)
    for module in filter(_is_stacked, model.modules()):
        config: Any = module.config
        config._experts_implementation = _FEW_BITS


def _is_stacked(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def few_bits_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The library's experts, up to rounding. A token's bits do not depend on the tokens beside it.

    Args:
        module: the experts of a layer.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: each token's experts, `[tokens, experts of a token]`.
        top_k_weights: what their outputs are multiplied by, likewise.
    """
    inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states, top_k_index)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(module, "down_proj", inner, top_k_index.reshape(-1, 1))
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    found = outer.view(*top_k_index.shape, -1)
    weighted = found * top_k_weights.to(found.dtype)[..., None]
    mixed = weighted[:, 0]
    for place in range(1, found.shape[1]):
        mixed = mixed + weighted[:, place]
    return mixed


def _linear(module: Any, name: str, states: Tensor, chosen: Tensor) -> Tensor:
    """Each row's products with its experts' matrices, `[rows * each, outputs]` in the library's order."""
    weights: Tensor = getattr(module, name)
    if weights.dtype == torch.uint8:
        found = chosen_product(states.contiguous(), weights, chosen.contiguous())
        if name == "gate_up_proj" and not module.is_concatenated:  # packed in two halves
            found = found.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    else:
        matrices, rows = weights if module.is_transposed else weights.mT, states.repeat_interleave(chosen.shape[1], 0)
        found = rows.new_empty(len(rows), matrices.shape[-1])
        for expert in chosen.unique().tolist():
            own = chosen.flatten() == expert
            found[own] = rows[own] @ matrices[expert]
    return found + getattr(module, f"{name}_bias")[chosen.flatten()] if module.has_bias else found
