"""A tensor on the wire: its dtype and shape as whole numbers in the header, and its data as bytes.

Between two passes the CPU caches are cold, and each call of PyTorch or NumPy takes microseconds. So values that depend
on dtype and shape alone are computed once.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ppd_runtime.pipeline.fields import WireError

Frame = bytes | memoryview | ctypes.Array[ctypes.c_ubyte]
"""A piece of a message on its way out."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The index is the number on the wire."""
_MOST_DIMENSIONS = 6
_MOST_BYTES = 2**31
_MOST_SHAPES = 1024  # whose values are kept


class Outgoing(NamedTuple):
    """The part of an outgoing tensor's encoding that depends on dtype and shape alone."""

    description: bytes
    memory: type[ctypes.Array[ctypes.c_ubyte]]
    """The type of a byte array of the tensor's size."""

    def bytes_of(self, tensor: Tensor) -> Frame | None:
        """The tensor's own memory, kept alive by the result; None if the tensor is not contiguous on the CPU."""
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        memory = self.memory.from_address(tensor.data_ptr())
        memory.tensor = tensor  # type: ignore[attr-defined]
        return memory


class Arriving(NamedTuple):
    """A tensor's description, decoded."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int

    def tensor_of(self, frame: bytes | memoryview | Tensor) -> Tensor:
        """The tensor of the bytes in `frame`: a copy, or a view of a `Tensor` of bytes. WireError for a wrong size."""
        if len(frame) != self.num_bytes:
            raise WireError("a tensor whose bytes do not fit its shape")
        if isinstance(frame, Tensor):
            return frame.view(self.dtype).view(self.shape)
        return torch.frombuffer(bytearray(frame), dtype=self.dtype).view(self.shape)


def on_the_host(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU; for a GPU tensor in pinned memory, which the GPU writes and PyTorch reuses."""
    if not tensor.is_cuda:
        return tensor.cpu().contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor)
    return pinned


@lru_cache(_MOST_SHAPES)
def outgoing(dtype: torch.dtype, shape: Sequence[int]) -> Outgoing:
    """The encoding for a dtype and shape; raises WireError if no message may have such a tensor."""
    if dtype not in _DTYPES:
        raise WireError(f"a tensor of {dtype}")
    return Outgoing(array("q", [_DTYPES.index(dtype), *shape]).tobytes(), ctypes.c_ubyte * _num_bytes(dtype, shape))


@lru_cache(_MOST_SHAPES)
def arriving(description: bytes) -> Arriving:
    """The decoded description; raises WireError if no message may have such a tensor."""
    numbers = array("q", description if len(description) % 8 == 0 else b"")
    if not numbers or not 0 <= numbers[0] < len(_DTYPES):
        raise WireError("a tensor of an unknown dtype")
    dtype, shape = _DTYPES[numbers[0]], tuple(numbers[1:])
    return Arriving(dtype, shape, _num_bytes(dtype, shape))


def _num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The size of a tensor in bytes; raises WireError if no message may have this shape."""
    if len(shape) > _MOST_DIMENSIONS:
        raise WireError("a tensor with too many dimensions")
    num_bytes = math.prod(shape) * dtype.itemsize
    if not all(size > 0 for size in shape) or num_bytes > _MOST_BYTES:
        raise WireError("a tensor with an impossible shape")
    return num_bytes
