"""Matrices of few bits as they lie in memory and in files: `quantised.h` reads them, and says how rows lie in tiles.

A packed matrix is a vector of bytes. It begins with a tag that names its format, its outputs and its inputs, so that
whoever has the bytes knows what they are.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.models.native.formats import GROUP, NUMBER_FORMATS, Array, NumberFormat, Numbers
from ppd_runtime.models.native.library import load
from ppd_runtime.models.native.products import TILE

LAYOUT = 4
"""Version of packed matrices' memory layout."""
_TAG, _MAGIC, _TAG_BYTES, _WHOLE = struct.Struct("<4sIIIqq"), b"ppdq", 64, 64
_CHUNK = 4  # adjacent inputs of a row
_NUMBERS = {form.number: form for form in NUMBER_FORMATS.values()}


class Packed(NamedTuple):
    """What a packed matrix's tag says."""

    form: NumberFormat
    outputs: int
    inputs: int


def packed_bytes(form: NumberFormat, outputs: int, inputs: int) -> int:
    """Bytes of a packed matrix."""
    return _TAG_BYTES + -(-outputs * _row_bytes(inputs, form) // _WHOLE) * _WHOLE


def packed_as(packed: Tensor) -> Packed:
    """What a packed matrix is; ValueError for other bytes."""
    if packed.dtype == torch.uint8 and packed.dim() == 1 and len(packed) >= _TAG_BYTES:
        magic, layout, number, _, outputs, inputs = _TAG.unpack(packed[: _TAG.size].numpy().tobytes())
        form = _NUMBERS.get(number)
        known = magic == _MAGIC and layout == LAYOUT and form and min(outputs, inputs) > 0 and not inputs % form.inputs
        if known and form and packed_bytes(form, outputs, inputs) == len(packed):
            return Packed(form, outputs, inputs)
    raise ValueError(f"weights: {list(packed.shape)} of {packed.dtype} are no packed matrix of this version")


def begin_and_end(form: NumberFormat, outputs: int, inputs: int) -> tuple[bytes, bytes]:
    """The bytes before and after the rows of a packed matrix."""
    tag = _TAG.pack(_MAGIC, LAYOUT, form.number, 0, outputs, inputs)
    return tag.ljust(_TAG_BYTES, b"\0"), bytes(-outputs * _row_bytes(inputs, form) % _WHOLE)


def pack(numbers: Numbers) -> Tensor:
    """A whole matrix, packed."""
    outputs, groups, _ = numbers.codes.shape
    begin, end = begin_and_end(numbers.form, outputs, groups * GROUP)
    parts = (np.frombuffer(begin, np.uint8), packed_rows(numbers).reshape(-1), np.frombuffer(end, np.uint8))
    return torch.from_numpy(np.concatenate(parts))


def packed_rows(numbers: Numbers) -> Array:
    """Rows as in a packed matrix, uint8 `[rows, bytes of a row]`: all, or some that begin at a multiple of `TILE` and
    are a multiple of it or the last ones."""
    outputs, groups, _ = numbers.codes.shape
    packed = np.empty((outputs, _row_bytes(groups * GROUP, numbers.form)), np.uint8)
    whole = outputs // TILE * TILE
    for some, rows in ((slice(whole), TILE), (slice(whole, None), outputs - whole)):
        if len(packed[some]):
            tiles = packed[some].reshape(-1, rows * packed.shape[1])
            places, content = _places(tiles, numbers.form, rows), _content(numbers.some(some), rows)
            for place, part in zip(places, content, strict=True):
                place[:] = part.reshape(place.shape)
    return packed


def unpack(packed: Tensor, rows: Sequence[int] | Tensor | None = None) -> Numbers:
    """What a packed matrix holds, or what these rows of it hold, in their order."""
    form, outputs, inputs = packed_as(packed)
    size, content = _row_bytes(inputs, form), packed.numpy()[_TAG_BYTES:]
    whole, chosen = outputs // TILE, np.arange(outputs) if rows is None else np.asarray(rows, np.int64)
    tiles, place = np.unique(chosen // TILE, return_inverse=True)
    full, rest = (
        content[: whole * TILE * size].reshape(whole, TILE * size),
        content[whole * TILE * size : outputs * size],
    )
    parts = [(full[tiles[tiles < whole]], TILE), (rest[None][: np.count_nonzero(tiles == whole)], outputs % TILE)]
    numbers = [_numbers(some, form, rows) for some, rows in parts if len(some)]
    return Numbers.joined(numbers).some(place * TILE + chosen % TILE)


def rows_in_floats(packed: Tensor, rows: Tensor) -> Tensor:
    """These rows of a packed matrix, int64 `[count]`, in float32 `[count, inputs]`; each number is exact."""
    inputs, chosen = packed_as(packed).inputs, rows.to(torch.int64).contiguous()
    found = torch.empty(len(chosen), inputs, dtype=torch.float32)
    convert = load().ppd_rows_in_floats
    convert.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    if not convert(packed.data_ptr(), len(packed), inputs, chosen.data_ptr(), len(chosen), found.data_ptr()):
        raise IndexError(f"weights: a packed matrix has no such row among {rows.tolist()[:8]}")
    return found


def as_floats(packed: Tensor) -> Tensor:
    """A packed matrix in float32, `[outputs, inputs]`."""
    return rows_in_floats(packed, torch.arange(packed_as(packed).outputs))


def _row_bytes(inputs: int, form: NumberFormat) -> int:
    scales = (1 if form.exponents else 2) + 2 * form.has_minimum
    return inputs // form.inputs * (scales + form.groups * sum(_sizes(form)))


def _sizes(form: NumberFormat) -> list[int]:
    """Bytes of a row's group: whole numbers for scales, those for minimums, and each plane's codes."""
    of_minimums = form.halves if form.has_minimum and not form.shares_bytes else 0
    return [form.halves, of_minimums, *(GROUP * bits // 8 for bits in form.planes)]


def _places(tiles: Array, form: NumberFormat, rows: int) -> list[Array]:
    """Views of tiles of `rows` rows, uint8 `[tiles, blocks, groups of a block or 1, bytes]`: scales, minimums, whole
    numbers of either, and each plane; what a format lacks has no bytes."""
    parts, minimum_parts, *planes = _sizes(form)
    blocks = tiles.reshape(len(tiles), -1, rows * _row_bytes(form.inputs, form))
    regions = [
        (1, [1 if form.exponents else 2, 2 * form.has_minimum]),
        (form.groups, [parts, minimum_parts]),
        (form.groups, planes),
    ]
    found, begin = [], 0
    for count, sizes in regions:
        end = begin + count * sum(sizes) * rows
        region = blocks[:, :, begin:end].reshape(*blocks.shape[:2], count, sum(sizes) * rows)
        found += np.split(region, np.cumsum(np.array(sizes[:-1]) * rows), axis=3)
        begin = end
    return found


def _content(numbers: Numbers, rows: int) -> list[Array]:
    """The content of `_places` for tiles of `rows` rows."""
    nothing, form = np.zeros(0, np.uint8), numbers.form

    def in_tiles(array: Array | None) -> Array:
        """`[tiles, blocks or groups, .., rows]`, in bytes."""
        if array is None:
            return nothing
        tiles = array.reshape(-1, rows, *array.shape[1:])
        return np.ascontiguousarray(np.moveaxis(tiles, 1, -1)).view(np.uint8)

    parts, minimum_parts = numbers.parts, numbers.minimum_parts
    if parts is not None and minimum_parts is not None and form.shares_bytes:
        parts, minimum_parts = parts.view(np.uint8) | minimum_parts << 4, None
    found, shift = [in_tiles(numbers.scales), in_tiles(numbers.minimums), in_tiles(parts), in_tiles(minimum_parts)], 0
    for bits in form.planes:
        found.append(_plane(numbers.codes >> np.uint8(shift), bits, rows))
        shift += bits
    return found


def _plane(codes: Array, bits: int, rows: int) -> Array:
    """The lowest bits of codes, `[rows, groups, 32]`, as in tiles: `[tiles, groups, lines, rows, 4]`."""
    some = codes & np.uint8(2**bits - 1)
    fields = some.reshape(-1, rows, codes.shape[1], 8 // bits, bits, _CHUNK)
    lines = fields[:, :, :, 0].copy()
    for above in range(1, 8 // bits):
        lines |= fields[:, :, :, above] << np.uint8(above * bits)
    return lines.transpose(0, 2, 3, 1, 4)


def _numbers(tiles: Array, form: NumberFormat, rows: int) -> Numbers:
    """Numbers in tiles of `rows` rows."""
    scales, minimums, parts, minimum_parts, *planes = _places(tiles, form, rows)

    def in_rows(place: Array, dtype: type, *sizes: int) -> Array:
        """`[rows, blocks or groups, ..]`."""
        count = place.shape[1] * place.shape[2]
        array: Array = np.ascontiguousarray(place).view(dtype).reshape(len(tiles), count, *sizes, rows)
        return np.ascontiguousarray(np.moveaxis(array, -1, 1)).reshape(-1, *array.shape[1:-1])

    codes, shift = np.zeros((), np.uint8), 0
    for place, bits in zip(planes, form.planes, strict=True):
        codes = codes | _codes(place, bits, rows) << np.uint8(shift)
        shift += bits
    halves, of_minimums = form.halves, None
    of_scales = in_rows(parts, np.int8, halves) if halves else None
    if of_scales is not None and form.has_minimum:
        of_minimums = of_scales.view(np.uint8) >> 4 if form.shares_bytes else in_rows(minimum_parts, np.uint8, halves)
    if of_scales is not None and form.shares_bytes:
        of_scales = of_scales & np.int8(15)
    scale = in_rows(scales, np.uint8 if form.exponents else np.float16)
    return Numbers(
        form, codes, scale, of_scales, in_rows(minimums, np.float16) if form.has_minimum else None, of_minimums
    )


def _codes(plane: Array, bits: int, rows: int) -> Array:
    """A plane's codes, `[rows, groups, 32]`."""
    groups = plane.shape[1] * plane.shape[2]
    lines = plane.reshape(len(plane), groups, bits, rows, _CHUNK).transpose(0, 3, 1, 2, 4)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    fields = (lines[:, :, :, None] >> shifts) & np.uint8(2**bits - 1)
    return fields.reshape(-1, groups, GROUP)
