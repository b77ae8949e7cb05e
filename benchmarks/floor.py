"""Floors of a decoding step: its matrix products and nothing else, and its weights read once and nothing else."""

import torch
from torch import nn
from torch.nn.functional import linear


class Products:
    """The products of all linear layers in `module`, each with a one-token vector of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
        self._vectors = [torch.randn(1, 1, weight.shape[1], dtype=weight.dtype) for weight in self.weights]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass streams."""
        return sum(weight.nbytes for weight in self.weights)

    def run(self) -> None:
        """One pass; call it in inference mode."""
        for weight, vector in zip(self.weights, self._vectors, strict=True):
            linear(vector, weight)


class Reading:
    """One core's reading of so many bytes, as fast as it goes here: a scalar product of two halves of them."""

    def __init__(self, num_bytes: int) -> None:
        numbers = num_bytes // 8
        self._halves = torch.ones(numbers), torch.ones(numbers)

    def run(self) -> None:
        """Read them once."""
        torch.dot(*self._halves)
