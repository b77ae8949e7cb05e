"""Linear layers with packed weights, in a model of the library's; `formats` says what they hold."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ppd_runtime.models.native.formats import as_floats, format_of, pack, packed_rows, quantise
from ppd_runtime.models.native.products import product


class QuantisedLinear(nn.Module):
    """A linear layer over any number of tokens, whose weight is a packed matrix.

    Args:
        weight: uint8 `[outputs, bytes of a row]`.
        bias: `[outputs]` in float32, or None.
        in_features: inputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, in_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, len(weight)
        self.weights = format_of(in_features, weight.shape[1])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., outputs]` of states `[..., inputs]`, in float32."""
        flat = states.reshape(-1, self.in_features).contiguous()
        found = product(flat, self.weight).view(*states.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias

    def rows(self, chosen: Sequence[int]) -> "QuantisedLinear":
        """A layer with these outputs alone."""
        weight = packed_rows(self.weight, self.in_features, chosen)
        return QuantisedLinear(weight, None if self.bias is None else self.bias[list(chosen)], self.in_features)

    def packed(self, matrix: Tensor) -> Tensor:
        """Another matrix of the same shape, in floats, packed in this layer's format."""
        return pack(*quantise(matrix, self.weights), self.weights)

    def in_floats(self) -> nn.Linear:
        """The same layer with its weight in float32."""
        twin = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        twin.weight = nn.Parameter(as_floats(self.weight, self.in_features), requires_grad=False)
        if self.bias is not None:
            twin.bias = nn.Parameter(self.bias.clone(), requires_grad=False)
        return twin


def take_packed(model: nn.Module, packed: Mapping[str, Tensor]) -> None:
    """Put packed weights, by name, in the place of the weights of a model's linear layers; ValueError where one has
    another shape."""
    for name, weight in packed.items():
        path = name.removesuffix(".weight")
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if len(weight) != linear.out_features:
            raise ValueError(f"weights: {name} has {len(weight)} rows, for {linear.out_features} outputs")
        parent, _, attribute = path.rpartition(".")
        taken = QuantisedLinear(weight, linear.bias, linear.in_features)
        setattr(model.get_submodule(parent), attribute, taken)


@torch.no_grad()
def with_floats(module: nn.Module) -> nn.Module:
    """The module with its packed linear layers in float32: its own are replaced, or it is itself."""
    if isinstance(module, QuantisedLinear):
        return module.in_floats()
    for path, inner in list(module.named_modules()):
        if isinstance(inner, QuantisedLinear):
            parent, _, attribute = path.rpartition(".")
            setattr(module.get_submodule(parent), attribute, inner.in_floats())
    return module
