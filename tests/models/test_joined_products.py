"""Products of the same states become one call, and those of other states do not."""

import torch
from compilers import needs_compiler
from torch import Tensor, nn

from ppd_runtime.models.compiled.export import _FewRows
from ppd_runtime.models.compiled.joined_products import join_products
from ppd_runtime.models.native.products import PRODUCTS

pytestmark = needs_compiler
NAMES = ("first", "second", "third", "fourth", "behind")


class Projections(nn.Module):
    """Four products of the same states, with a bias or without, and one of what comes of them."""

    def forward(self, states: Tensor, weights: dict[str, Tensor], bias: Tensor) -> Tensor:
        first, second, third, fourth = (nn.functional.linear(states, weights[name]) for name in NAMES[:4])
        mixed = (first + bias) * nn.functional.linear(states, weights["second"], bias) + second * third.sin() + fourth
        return nn.functional.linear(mixed, weights["behind"])


def exported(tokens: int) -> tuple[torch.export.ExportedProgram, tuple[object, ...]]:
    generator = torch.Generator().manual_seed(0)
    states, bias = torch.randn(1, tokens, 16, generator=generator), torch.randn(16, generator=generator)
    weights = {name: torch.randn(16, 16, generator=generator) for name in NAMES}
    size = {1: torch.export.Dim("tokens", min=2, max=9)} if tokens > 1 else None
    inputs = (states, weights, bias)
    with _FewRows():
        shapes = (size, dict.fromkeys(NAMES), None)
        return torch.export.export(Projections(), inputs, dynamic_shapes=shapes, strict=False), inputs


def test_what_reads_the_same_states_is_joined_and_nothing_else() -> None:
    for tokens in (1, 4):
        program, inputs = exported(tokens)
        expected = program.module()(*inputs)
        join_products(program)
        calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
        counts = [calls.count(operator.in_graphs()) for operator in PRODUCTS]
        assert counts == [1, 1, 1], "five products of the states as two calls, and the one behind them alone"
        assert torch.equal(program.module()(*inputs), expected)
