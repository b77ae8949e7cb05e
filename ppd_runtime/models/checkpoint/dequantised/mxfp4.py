"""The experts of gpt-oss in MXFP4: numbers of four bits, and a power of two for each 32 of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime.models.checkpoint.dequantised.stored import Matrix, StoredTensor, part

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = {"U8": torch.uint8}
_IN_A_BLOCK = 16
"""Bytes of a block; the lower half of each is the first of two numbers."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


@dataclass(frozen=True)
class Mxfp4:
    """`NAME_blocks` `[experts, outputs, blocks, 16]` and `NAME_scales` `[experts, outputs, blocks]` are the experts of
    `NAME`, `[experts, inputs, outputs]`. Each weight is exact in float32."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """See `Scheme`."""
        names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
        return {name: self._experts(stored, name) for name in names}

    def _experts(self, stored: Mapping[str, StoredTensor], name: str) -> Matrix:
        blocks = part(stored, name + _BLOCKS, _BYTES, None)
        if len(blocks.shape) != 4 or blocks.shape[3] != _IN_A_BLOCK or 0 in blocks.shape:
            raise ValueError(
                f"has {blocks.name} as {list(blocks.shape)}, not as [experts, outputs, blocks, {_IN_A_BLOCK}]"
            )
        experts, outputs, count, _ = blocks.shape
        scales = part(stored, name + _SCALES, _BYTES, blocks.shape[:3])
        shape = (experts, count * 2 * _IN_A_BLOCK, outputs)
        return Matrix({"blocks": blocks, "scales": scales}, shape, self._floats)

    def _floats(self, parts: Mapping[str, Tensor]) -> Tensor:
        """One expert."""
        blocks, exponents = parts["blocks"], parts["scales"].to(torch.int32) - _BIAS
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])[codes.int()]
        return torch.ldexp(values, exponents[..., None]).flatten(-2).T.contiguous()
