"""Weights of 8 and 4 bits: their numbers, how they lie in memory, and the products that they stand for.

A group is 32 neighbouring inputs of a row: whole numbers q and a scale d in float16, each weight is d·q. GGUF's Q8_0
and Q4_0 have the same numbers. `quantised.h` says how rows lie in tiles, and how a product is made.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.products import TILE

GROUP = 32
"""Neighbouring inputs that share a scale."""
BITS = {"int8": 8, "int4": 4}
"""Of a weight, by the name of the format."""
LAYOUT = 2
"""Changes with how packed rows lie in memory."""
_CHUNK, _SCALE_BYTES = 4, 2
_SCALES_TRIED = 16
_ROWS_AT_ONCE = 4096
_LEAST = 2.0**-100


def row_bytes(inputs: int, weights: str) -> int:
    """Bytes of a packed row."""
    return inputs // GROUP * (GROUP * BITS[weights] // 8 + _SCALE_BYTES)


def format_of(inputs: int, num_bytes: int) -> str:
    """The format in which a row of so many inputs has so many bytes; ValueError where none has."""
    for name in BITS:
        if inputs % GROUP == 0 and row_bytes(inputs, name) == num_bytes:
            return name
    raise ValueError(f"weights: no format has rows of {num_bytes} bytes for {inputs} inputs")


def quantise(weight: Tensor, weights: str) -> tuple[Tensor, Tensor]:
    """Whole numbers, int8 `[outputs, groups, 32]`, and scales, float16 `[outputs, groups]`, of a matrix in floats.

    int8: the scale is the largest number of a group over 127. int4: of some scales near the largest number over -8 that
    with the least squared error. A group of zeros has the scale 0.

    Raises:
        ValueError: where the inputs are no multiple of 32, or a number is not finite or too large for a scale.
    """
    inputs = weight.shape[1]
    if inputs % GROUP:
        raise ValueError(f"weights={weights!r}: {inputs} inputs are no multiple of {GROUP}")
    parts = [_quantised(some.float(), weights) for some in weight.split(_ROWS_AT_ONCE)]
    return torch.cat([q for q, _ in parts]), torch.cat([d for _, d in parts])


def _quantised(weight: Tensor, weights: str) -> tuple[Tensor, Tensor]:
    groups = weight.reshape(len(weight), -1, GROUP)
    if not torch.isfinite(groups).all() or groups.abs().max() > 127 * torch.finfo(torch.float16).max / 16:
        raise ValueError(f"weights={weights!r}: a weight is not finite, or too large for a scale in float16")
    place = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, place)[..., 0]
    if weights == "int8":
        scales = (extreme.abs() / 127).half()
        return _rounded(groups, scales, -127, 127), scales
    best, least = torch.zeros_like(extreme).half(), torch.full_like(extreme, torch.inf)
    for step in range(_SCALES_TRIED):
        scales = (extreme / (-8 + step / (_SCALES_TRIED - 1))).half()  # -8 to -7
        error = (groups - _rounded(groups, scales, -8, 7) * scales.float()[..., None]).square().sum(-1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return _rounded(groups, best, -8, 7), best


def _rounded(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    inverse = torch.where(scales == 0, torch.zeros(()), 1 / scales.float())
    return (groups * inverse[..., None]).round_().clamp_(low, high).to(torch.int8)


def pack(numbers: Tensor, scales: Tensor, weights: str) -> Tensor:
    """Whole numbers and scales, as `quantise` gives them, as a packed matrix: uint8 `[outputs, row_bytes]`."""
    if weights == "int8":
        return pack_values(numbers.contiguous().view(torch.uint8), scales)
    low, high = (numbers + 8).to(torch.uint8).chunk(2, dim=-1)
    return pack_values(low | high << 4, scales)


def pack_values(values: Tensor, scales: Tensor) -> Tensor:
    """A packed matrix of bytes that hold whole numbers.

    Args:
        values: uint8 `[outputs, groups, bytes]`; 32 of int8, or 16 of int4: each holds input j plus 8, and above it
            input j + 16 plus 8.
        scales: float16 `[outputs, groups]`.
    """
    outputs, groups, size = values.shape
    packed = np.empty((outputs, groups * (size + _SCALE_BYTES)), np.uint8)
    whole = outputs // TILE * TILE
    for some, rows in ((slice(whole), TILE), (slice(whole, None), outputs - whole)):
        if len(packed[some]):
            _fill(packed[some], values[some].numpy(), scales[some].numpy(), rows)
    return torch.from_numpy(packed)


def _fill(packed: np.ndarray, values: np.ndarray, scales: np.ndarray, rows: int) -> None:
    """Write tiles of so many rows each: of every group the rows' chunks in turn, then their scales."""
    groups, size = values.shape[1:]
    tiles = packed.reshape(-1, groups, rows * (size + _SCALE_BYTES))
    chunks = np.ascontiguousarray(values).view(np.uint32).reshape(len(tiles), rows, groups, size // _CHUNK)
    tiles[:, :, : rows * size] = chunks.transpose(0, 2, 3, 1).reshape(len(tiles), groups, -1).view(np.uint8)
    of_tiles = np.ascontiguousarray(scales.reshape(len(tiles), rows, groups).transpose(0, 2, 1))
    tiles[:, :, rows * size :] = of_tiles.view(np.uint8)


def unpack(packed: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Whole numbers and scales of a packed matrix, as `quantise` gives them."""
    weights, groups = format_of(inputs, packed.shape[1]), inputs // GROUP
    parts = [_of_tile(tile, groups, weights) for tile in packed.split(TILE)]
    return torch.cat([q for q, _ in parts]), torch.cat([d for _, d in parts])


def _of_tile(tile: Tensor, groups: int, weights: str) -> tuple[Tensor, Tensor]:
    rows = len(tile)
    size = rows * GROUP * BITS[weights] // 8
    values, scales = tile.reshape(groups, -1).split([size, rows * _SCALE_BYTES], dim=1)
    chunks = values.reshape(groups, -1, rows, _CHUNK)
    if weights == "int4":
        chunks = torch.cat([chunks & 15, chunks >> 4], dim=1).to(torch.int8) - 8
    else:
        chunks = chunks.contiguous().view(torch.int8)
    numbers = chunks.permute(2, 0, 1, 3).reshape(rows, groups, GROUP)
    return numbers, scales.contiguous().view(torch.float16).T.contiguous()


def as_floats(packed: Tensor, inputs: int) -> Tensor:
    """A packed matrix in float32, `[outputs, inputs]`; each number is exact."""
    numbers, scales = unpack(packed, inputs)
    return (numbers.float() * scales.float()[..., None]).view(len(packed), inputs)


def packed_rows(packed: Tensor, inputs: int, rows: Sequence[int] | Tensor) -> Tensor:
    """A packed matrix of these rows of another one."""
    weights, (numbers, scales) = format_of(inputs, packed.shape[1]), unpack(packed, inputs)
    chosen = torch.as_tensor(rows)
    return pack(numbers[chosen], scales[chosen], weights)


def product_in_numpy(states: Tensor, packed: Tensor) -> Tensor:
    """The product of states `[tokens, inputs]` with a packed matrix, step by step: C++ has to give these bits."""
    numbers, scales = (tensor.numpy() for tensor in unpack(packed, states.shape[1]))
    of_states = states.numpy().reshape(len(states), -1, GROUP)
    largest = np.abs(of_states).max(-1)
    finite, small = np.isfinite(largest), largest < np.float32(_LEAST)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(finite & ~small, np.float32(127) / largest, np.float32(0))
        a = np.where((finite & ~small)[..., None], np.rint(of_states * inverse[..., None]), np.float32(0))
        s = np.where(small, np.float32(0), np.where(finite, largest / np.float32(127), np.float32(np.nan)))
        result = np.zeros((len(states), len(packed)), np.float32)
        for group in range(of_states.shape[1]):
            whole = a[:, group].astype(np.int32) @ numbers[:, group].astype(np.int32).T
            scale = scales[None, :, group].astype(np.float32) * s[:, group, None]
            result = result + whole.astype(np.float32) * scale
    return torch.from_numpy(result)


def forms() -> list[str]:
    """The forms of the product that this CPU has, by instruction set; the last is the one that is used."""
    names = load().ppd_quantised_forms
    names.restype = ctypes.c_char_p
    return names().decode().split(",")


@contextmanager
def product_in_form(form: str) -> Iterator[None]:
    """Have this process make products in one of `forms` meanwhile."""
    choose = load().ppd_choose_quantised_form
    if not choose(form.encode()):
        raise ValueError(f"form={form!r}: this CPU has {', '.join(forms())}")
    try:
        yield
    finally:
        choose(forms()[-1].encode())
