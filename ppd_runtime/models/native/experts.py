"""Our own pass through stacked experts whose matrices have few bits: for a token only its experts' weights are read.

The library's modules keep their parameters, so this serves every family whose experts let the library choose how they
run. A parameter may be packed, uint8 `[experts, bytes]`, or floats.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ppd_runtime.models.native.library import Operator

_FEW_BITS, _IN_GRAPHS = "ppd_few_bits", "ppd_few_bits_in_graphs"


def _like_chosen(states: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    return states.new_empty(chosen.numel(), weights.shape[1])


chosen_product = Operator("chosen_linear", ("states", "weights", "chosen"), (), _like_chosen)
"""`[rows * each, outputs]` of states, `[rows, inputs]` in float32, and of those matrices that each row's numbers in
`chosen`, int64 `[rows, each]`, name: packed ones, uint8 `[matrices, bytes]`, or `[matrices, outputs, inputs]` as
`product` takes one. All are contiguous."""


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


def choose_few_bits_experts(model: nn.Module, in_graphs: bool = False) -> None:
    """Make a float32 model on a CPU run its experts this way, or have a graph of it do so."""
    name = _IN_GRAPHS if in_graphs else _FEW_BITS
    ALL_EXPERTS_FUNCTIONS.register(name, partial(few_bits_experts, in_graphs=in_graphs))
    for module in filter(_is_stacked, model.modules()):
        config: Any = module.config
        config._experts_implementation = name


def _is_stacked(module: nn.Module) -> bool:
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def few_bits_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, in_graphs: bool = False
) -> Tensor:
    """The library's experts, up to rounding. A token's bits do not depend on the tokens beside it.

    Args:
        module: the experts of a layer.
        hidden_states: `[tokens, hidden_size]`.
        top_k_index: each token's experts, `[tokens, experts of a token]`.
        top_k_weights: what their outputs are multiplied by, likewise.
        in_graphs: a graph is made, for packed matrices and floats.
    """
    linear = partial(_in_graph if in_graphs else _linear, module)
    inner = linear("gate_up_proj" if module.has_gate else "up_proj", hidden_states, top_k_index)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = linear("down_proj", inner, top_k_index.reshape(-1, 1))
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    found = outer.view(*top_k_index.shape, -1)
    weighted = found * top_k_weights.to(found.dtype)[..., None]
    mixed = weighted[:, 0]
    for place in range(1, found.shape[1]):
        mixed = mixed + weighted[:, place]
    return mixed


def _in_graph(module: Any, name: str, states: Tensor, chosen: Tensor) -> Tensor:
    if module.is_transposed:
        raise NotImplementedError("its experts' matrices are turned")
    found: Tensor = chosen_product.in_graphs()(states.contiguous(), getattr(module, name), chosen.contiguous())
    return found + getattr(module, f"{name}_bias")[chosen.flatten()] if module.has_bias else found


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
