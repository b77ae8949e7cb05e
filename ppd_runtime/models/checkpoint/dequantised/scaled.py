"""Weights of eight bits, floats or integers, that are multiplied by a scale: of the matrix, a row, or a block."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime.models.checkpoint.dequantised.numbers import ScaledNumbers
from ppd_runtime.models.checkpoint.dequantised.stored import FLOATS, Matrix, Shape, StoredTensor, part

EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2")
_SCALES = FLOATS.keys() | {"F8_E8M0"}
_SUFFIXES = ("_scale_inv", "_scale")
"""Behind a weight's name: its scale's. Both are factors of the weight, whatever the first is called."""


@dataclass(frozen=True)
class Scaled:
    """A weight is its number times its scale, in float32: exact if the scale has 20 binary digits or fewer for floats,
    as in bfloat16 and float16, and 16 for integers; else rounded once, to float32."""

    kinds: tuple[str, ...]
    """What weights are stored in."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: those of a row or the matrix do."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """See `Scheme`."""
        return {name: self._matrix(stored, of) for name, of in stored.items() if of.dtype in self.kinds}

    def _matrix(self, stored: Mapping[str, StoredTensor], weight: StoredTensor) -> Matrix:
        names = [weight.name + suffix for suffix in _SUFFIXES]
        scale = part(stored, next((name for name in names if name in stored), names[-1]), dict.fromkeys(_SCALES), None)
        if len(weight.shape) not in (2, 3):
            raise ValueError(f"has {weight.name} of {len(weight.shape)} dimensions as {weight.dtype}, not of 2 or 3")
        if scale.shape not in self._allowed(weight.shape):
            shared = f"blocks of {list(self.block)}" if self.block else "rows"
            shapes = f"{list(scale.shape)} for {list(weight.shape)} in {shared}"
            raise ValueError(f"has a scale of another shape than its weight's: {scale.name} is {shapes}")
        parts = {"weight": weight, "scale": scale}
        if weight.dtype in EIGHT_BIT_FLOATS:
            return Matrix(parts, weight.shape, lambda parts: self._numbers(parts).in_floats())
        return Matrix.of_numbers(parts, weight.shape, self._numbers)

    def _allowed(self, shape: Shape) -> list[Shape]:
        """Shapes that a scale may have."""
        stack, (outputs, inputs) = shape[:-2], shape[-2:]
        if self.block:
            return [(*stack, math.ceil(outputs / self.block[0]), math.ceil(inputs / self.block[1]))]
        of_rows = [(*stack, outputs, 1)]
        return [*of_rows, (*stack, 1, 1)] if stack else [*of_rows, (outputs,), (1, 1), (1,), ()]

    def _numbers(self, parts: Mapping[str, Tensor]) -> ScaledNumbers:
        weight, scale = parts["weight"], parts["scale"].float()
        outputs, inputs = weight.shape
        if self.block:
            scale = scale.repeat_interleave(self.block[0], 0)[:outputs]
            return ScaledNumbers(weight, scale, torch.arange(inputs) // self.block[1])
        return ScaledNumbers(weight, scale.reshape(-1, 1).expand(outputs, 1), torch.zeros(inputs, dtype=torch.int64))
