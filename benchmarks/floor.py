"""The floor of a decoding step: the matrix products of its one-token vectors with the weights, and nothing else."""

import torch
from torch import nn
from torch.nn.functional import linear


class Products:
    """The products of all linear layers in `module`, each with a one-token vector of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
        self._vectors = [torch.randn(1, 1, weight.shape[1], dtype=weight.dtype) for weight in self._weights]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass streams."""
        return sum(weight.nbytes for weight in self._weights)

    def run(self) -> None:
        """One pass; call it in inference mode."""
        for weight, vector in zip(self._weights, self._vectors, strict=True):
            linear(vector, weight)
