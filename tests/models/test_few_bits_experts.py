"""Experts of few bits: each token's outputs are those of its experts' linear layers, whatever tokens are beside it."""

from collections.abc import Callable

import pytest
import torch
from families.specimens import Specimen
from torch import Tensor, nn

from ppd_runtime.models.native.experts import choose_few_bits_experts, few_bits_experts, stacked_experts
from ppd_runtime.models.native.linear import QuantisedLinear, take_packed
from ppd_runtime.models.native.packing import as_floats, pack
from ppd_runtime.models.native.quantising import quantise

EXPERTS, OF_TOKEN, TOKENS, SIZE, INNER = 4, 2, 7, 32, 64
SETTINGS = {"hidden_size": SIZE, "head_dim": 8, "moe_intermediate_size": INNER, "intermediate_size": INNER}
Apart = Callable[[nn.Module, int, Tensor], Tensor]


def usual(experts: nn.Module, expert: int, states: Tensor) -> Tensor:
    gate, up = QuantisedLinear(experts.gate_up_proj[expert], None)(states).chunk(2, -1)
    return QuantisedLinear(experts.down_proj[expert], None)(experts.act_fn(gate) * up)


def of_gpt_oss(experts: nn.Module, expert: int, states: Tensor) -> Tensor:
    gate, up = QuantisedLinear(experts.gate_up_proj[expert], None)(states).chunk(2, -1)
    bias = experts.gate_up_proj_bias[expert]
    gate, up = (gate + bias[::2]).clamp(max=experts.limit), (up + bias[1::2]).clamp(-experts.limit, experts.limit)
    inner = (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))
    return QuantisedLinear(experts.down_proj[expert], experts.down_proj_bias[expert])(inner)


def without_gate(experts: nn.Module, expert: int, states: Tensor) -> Tensor:
    inner = experts.act_fn(QuantisedLinear(experts.up_proj[expert], None)(states))
    return QuantisedLinear(experts.down_proj[expert], None)(inner)


def packed_experts(family: str) -> nn.Module:
    """The last experts of a small model, its matrices packed, and biases that are not zeros."""
    torch.manual_seed(3)
    model = Specimen(family, settings=SETTINGS).build()
    packed = {}
    for name, weight in stacked_experts(model).items():
        matrices = weight.detach()
        if model.get_submodule(name.rpartition(".")[0]).is_transposed:
            matrices = matrices.transpose(1, 2)
            if "gate_up" in name:
                matrices = torch.cat([matrices[:, ::2], matrices[:, 1::2]], 1)
        packed[name] = torch.stack([pack(quantise(matrix.contiguous(), "int8")) for matrix in matrices])
    take_packed(model, packed)
    experts = model.get_submodule(name.rpartition(".")[0])
    for each, parameter in experts.named_parameters():
        if each.endswith("bias"):
            nn.init.normal_(parameter)
    choose_few_bits_experts(model)
    return experts


@pytest.mark.parametrize(
    ("family", "apart"),
    [("qwen3_moe", usual), ("mixtral", usual), ("gpt_oss", of_gpt_oss), ("nemotron_h", without_gate)],
)
@torch.inference_mode()
def test_a_token_gets_what_its_experts_give_apart(family: str, apart: Apart) -> None:
    experts, states = packed_experts(family), torch.randn(TOKENS, SIZE)
    chosen = torch.stack([torch.randperm(EXPERTS)[:OF_TOKEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, OF_TOKEN)
    found = experts(states, chosen, weights)
    for token in range(TOKENS):
        row = states[token : token + 1]
        first, second = (apart(experts, expert, row)[0] for expert in chosen[token].tolist())
        assert torch.equal(found[token], first * weights[token, 0] + second * weights[token, 1])
        assert torch.equal(found[token], experts(row, chosen[token : token + 1], weights[token : token + 1])[0])


@torch.inference_mode()
def test_floats_and_packed_matrices_meet() -> None:
    """Of a file whose gates and ups differ in format, only the matrices down are packed."""
    experts, states = packed_experts("qwen3_moe"), torch.randn(TOKENS, SIZE)
    chosen, weights = torch.tensor([[0, 3]] * TOKENS), torch.ones(TOKENS, OF_TOKEN)
    expected = experts(states, chosen, weights)
    floats = torch.stack([as_floats(each) for each in experts.gate_up_proj])
    experts.gate_up_proj = nn.Parameter(floats, requires_grad=False)
    found = few_bits_experts(experts, states, chosen, weights)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_a_matrix_of_another_shape_is_refused() -> None:
    model = Specimen("qwen3_moe", settings=SETTINGS).build()
    name = next(iter(stacked_experts(model)))
    wrong = torch.stack([pack(quantise(torch.ones(INNER, SIZE), "int8"))] * EXPERTS)
    with pytest.raises(ValueError, match=rf"weights: {name} is \[4, 64, 32\], not \[4, 128, 32\]"):
        take_packed(model, {name: wrong})
