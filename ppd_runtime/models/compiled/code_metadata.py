"""What a file of compiled code says of itself, and which weights a piece of one layer has."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from ppd_runtime.models.native.experts import chosen_product, stacked_experts
from ppd_runtime.models.native.layers import READS_MASK
from ppd_runtime.models.native.products import PRODUCTS, product_weights

READ_BY_PRODUCTS = "read_by_products"
"""The weights, by name, that nothing but our products reads, in JSON."""
DTYPES = "dtypes"
"""The dtypes of the code's inputs, the weights' last, in JSON: it reads the bytes of others as these."""


def metadata_of(program: ExportedProgram, piece: nn.Module | None) -> dict[str, str]:
    """What a program says of itself; `piece` is the layer it was made of, if its products are our own."""
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    told: dict[str, Any] = {DTYPES: [str(node.meta["val"].dtype) for node in inputs]}
    if piece is not None:
        names, operators = list(weights_of(piece)), {operator.in_graphs() for operator in (*PRODUCTS, chosen_product)}
        readers = dict(zip(names, inputs[-len(names) :], strict=True))  # the weights are the last inputs
        matrices = (product_weights(piece) | stacked_experts(piece).keys()) & set(names)
        told[READ_BY_PRODUCTS] = [
            name for name in sorted(matrices) if all(user.target in operators for user in readers[name].users)
        ]
        told[READS_MASK] = not {node.name for node in inputs}.isdisjoint(("position", "mask"))
    return {name: json.dumps(value) for name, value in told.items()}


def weights_of(piece: nn.Module) -> dict[str, Tensor]:
    """All that a piece of one layer computes with, by name; the embedding is not part of it."""
    return {name: tensor.detach() for name, tensor in tensors_of(piece)}


def tensors_of(piece: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same, as the piece has it."""
    for name, tensor in chain(piece.named_parameters(), piece.named_buffers()):
        if not name.startswith("embed_tokens."):
            yield name, tensor
