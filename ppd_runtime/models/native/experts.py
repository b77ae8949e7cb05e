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

from ppd_runtime.models.native.products import product

_FEW_BITS = "ppd_few_bits"


def stacked_experts(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The matrices of all experts of a layer, `[experts, outputs, inputs]` or with both turned, by name, of the modules
    that let the library choose how experts run.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if hasattr(module, "is_concatenated") and hasattr(module, "has_gate")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def choose_few_bits_experts(model: PreTrainedModel) -> None:
    """Make a float32 model on a CPU run its experts this way."""
    ALL_EXPERTS_FUNCTIONS.register(_FEW_BITS, few_bits_experts)
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            config: Any = module.config
            config._experts_implementation = _FEW_BITS


def few_bits_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The library's experts, up to rounding. A token's bits do not depend on the tokens beside it.

    Args:
        module: the experts of a layer.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: each token's experts, `[tokens, experts of a token]`.
        top_k_weights: what their outputs are multiplied by, likewise.
    """
    tokens, each = top_k_index.shape
    found = hidden_states.new_zeros(tokens, each, hidden_states.shape[-1])
    for expert in top_k_index.unique().tolist():
        token, place = (top_k_index == expert).nonzero(as_tuple=True)
        found[token, place] = _one_expert(module, hidden_states[token], expert)
    weighted = found * top_k_weights.to(found.dtype)[..., None]
    mixed = weighted[:, 0]
    for place in range(1, each):
        mixed = mixed + weighted[:, place]
    return mixed


def _one_expert(module: Any, states: Tensor, expert: int) -> Tensor:
    """One expert's outputs for these tokens, `[tokens, hidden_size]`."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, first, states, expert)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(module, "down_proj", inner, expert)
    return module.post_expert_norm(outer) if module.has_post_expert_norm else outer


def _linear(module: Any, name: str, states: Tensor, expert: int) -> Tensor:
    """A product of an expert's, in the order of outputs that the library has."""
    weight: Tensor = getattr(module, name)[expert]
    if weight.dtype == torch.uint8:
        found = product(states.contiguous(), weight)
        if module.has_gate and name == "gate_up_proj" and not module.is_concatenated:  # packed in two halves
            found = found.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    else:
        found = states @ (weight if module.is_transposed else weight.T)
    return found + getattr(module, f"{name}_bias")[expert] if module.has_bias else found
