"""Layers with packed weights for the library's models; see `packing`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppd_runtime.models.native.formats import NumberFormat
from ppd_runtime.models.native.packing import as_floats, pack, packed_as, rows_in_floats, unpack
from ppd_runtime.models.native.products import product
from ppd_runtime.models.native.quantising import quantise_roughly


class QuantisedLinear(nn.Module):
    """A linear layer over any number of tokens, whose weight is a packed matrix.

    Args:
        weight: packed by `pack`.
        bias: `[outputs]` in float32, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.form, self.out_features, self.in_features = packed_as(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., outputs]` of states `[..., inputs]`, in float32."""
        flat = states.reshape(-1, self.in_features).contiguous()
        found = product(flat, self.weight).view(*states.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias

    def rows(self, chosen: Sequence[int]) -> "QuantisedLinear":
        """A layer with these outputs alone."""
        weight = pack(unpack(self.weight.detach(), chosen))
        return QuantisedLinear(weight, None if self.bias is None else self.bias[list(chosen)])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.out_features, self.in_features

    def packed(self, matrix: Tensor) -> Tensor:
        """Another matrix of the same shape, in floats, packed roughly in this layer's format."""
        return pack(quantise_roughly(matrix, self.form))

    def in_floats(self) -> nn.Linear:
        """A copy of this layer with its weight in float32."""
        twin = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        twin.weight = nn.Parameter(as_floats(self.weight.detach()), requires_grad=False)
        if self.bias is not None:
            twin.bias = nn.Parameter(self.bias.clone(), requires_grad=False)
        return twin


class QuantisedEmbedding(nn.Module):
    """An embedding whose table is a packed matrix: only the rows of requested tokens become floats.

    Args:
        weight: packed by `pack`.
        library: the library's own, which may do more than look up; its table is not used.
    """

    def __init__(self, weight: Tensor, library: nn.Embedding) -> None:
        super().__init__()
        self.form, self.num_embeddings, self.embedding_dim = packed_as(weight)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.only_looks_up = type(library) is nn.Embedding and library.max_norm is None
        library.padding_idx = None  # it matters only in training, and few rows may lack it
        self._library = [library]  # in a list, so that it is no submodule

    def row_of(self, token: int) -> Tensor:
        """A token's row, `[1, 1, hidden_size]`."""
        return rows_in_floats(self.weight.detach(), torch.tensor([token]))[None]

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[..., hidden_size]` in float32."""
        rows = rows_in_floats(self.weight.detach(), token_ids.flatten())
        if self.only_looks_up:
            return rows.view(*token_ids.shape, -1)
        places = torch.arange(len(rows)).view(token_ids.shape)
        found: Tensor = torch.func.functional_call(self._library[0], {"weight": rows}, (places,))
        return found


def take_packed(model: nn.Module, packed: Mapping[str, Tensor]) -> None:
    """Replace weights of a model's linear layers, stacked experts and embedding by packed ones, by name; ValueError if
    a shape differs."""
    for name, weight in packed.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if (shape := _shape_for(module, weight)) != (expected := getattr(module, attribute).shape):
            raise ValueError(f"weights: {name} is {list(shape)}, not {list(expected)}")
        if weight.dim() > 1:
            setattr(module, attribute, _of_experts(weight))
            continue
        assert isinstance(module, nn.Linear | nn.Embedding)
        taken: nn.Module
        if isinstance(module, nn.Linear):
            taken = QuantisedLinear(weight, module.bias)
        else:
            taken = QuantisedEmbedding(weight, module)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, taken)


@dataclass(frozen=True)
class PackedExperts:
    """What one of the matrices in a parameter of stacked experts, uint8 `[experts, bytes]`, is."""

    form: NumberFormat
    matrix_shape: tuple[int, int]
    """Outputs and inputs."""
    experts: int

    def packed(self, matrix: Tensor) -> Tensor:
        """A parameter in which each expert has this matrix, in floats, packed roughly in this format."""
        return pack(quantise_roughly(matrix, self.form)).expand(self.experts, -1)


def _of_experts(weights: Tensor) -> nn.Parameter:
    """A parameter whose attribute `packing` says what its matrices are, where it has no memory, too."""
    parameter: Any = nn.Parameter(weights, requires_grad=False)
    form, outputs, inputs = packed_as(weights[0])
    parameter.packing = PackedExperts(form, (outputs, inputs), len(weights))
    return parameter


def _shape_for(module: nn.Module, weight: Tensor) -> tuple[int, ...]:
    """The shape of the floats that the library has in place of a packed matrix, or of one for each expert."""
    if weight.dim() == 1:
        return packed_as(weight)[1:]
    matrix = packed_as(weight[0])[1:]
    return (len(weight), *(reversed(matrix) if module.is_transposed else matrix))


@torch.no_grad()
def with_floats(module: nn.Module) -> nn.Module:
    """Replace the module's packed linear layers, or the module itself, by float32 ones."""
    if isinstance(module, QuantisedLinear):
        return module.in_floats()
    for path, inner in list(module.named_modules()):
        if isinstance(inner, QuantisedLinear):
            parent, _, attribute = path.rpartition(".")
            setattr(module.get_submodule(parent), attribute, inner.in_floats())
    return module
