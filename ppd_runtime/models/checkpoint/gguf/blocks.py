"""Quantised tensors of GGUF files: the byte layout of each type's blocks.

The types are described in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ppd_runtime.models.native.formats import GROUP, NUMBER_FORMATS, Array, Numbers

_Parts = tuple[Array, Array | None]
"""Integers for scales, `[blocks, groups · halves]`, and integers for minimums."""


@dataclass(frozen=True)
class _Block:
    """The layout of a block."""

    fields: Mapping[str, int]
    """Bytes of each field, in order: scale `d`, minimum `m`, `parts`, and code planes `q` and `h`."""
    runs: Sequence[int]
    """Each plane's run: n bytes hold n inputs in their lowest bits, and the next n inputs in the next bits."""
    parts: Callable[[Array], _Parts] | None = None
    adds: bool = False
    """Whether the minimum is added instead of subtracted."""


def _nibbles(parts: Array) -> _Parts:
    return parts & 15, parts >> 4


def _signed(parts: Array) -> _Parts:
    return parts, None


def _six_bits(parts: Array) -> _Parts:
    """Eight scales and eight minimums of six bits; the two highest bits of the last four are stored apart."""
    first, second, rest = np.split(parts, 3, axis=-1)
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=-1)
    return scales, np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=-1)


def _six_bits_signed(parts: Array) -> _Parts:
    """Sixteen numbers of six bits plus 32: first four bits of each, then two."""
    low, high = _spread(parts[:, :8], 4, 8), _spread(parts[:, 8:], 2, 4)
    return (low | high << 4) - np.uint8(32), None


def _four_and_two_bits(parts: Array) -> _Parts:
    """Eight numbers of six bits plus 32: first two bits of each, then four."""
    high, low = _spread(parts[:, :2], 2, 1), _spread(parts[:, 2:], 4, 1)
    return (low | high << 4) - np.uint8(32), None


_BLOCKS: Mapping[str, _Block] = {
    "Q4_0": _Block({"d": 2, "q": 16}, (16,)),
    "Q4_1": _Block({"d": 2, "m": 2, "q": 16}, (16,), adds=True),
    "Q5_0": _Block({"d": 2, "h": 4, "q": 16}, (16, 1)),
    "Q5_1": _Block({"d": 2, "m": 2, "h": 4, "q": 16}, (16, 1), adds=True),
    "Q8_0": _Block({"d": 2, "q": 32}, (32,)),
    "Q2_K": _Block({"parts": 16, "q": 64, "d": 2, "m": 2}, (32,), _nibbles),
    "Q3_K": _Block({"h": 32, "q": 64, "parts": 12, "d": 2}, (32, 32), _six_bits_signed),
    "Q4_K": _Block({"d": 2, "m": 2, "parts": 12, "q": 128}, (32,), _six_bits),
    "Q5_K": _Block({"d": 2, "m": 2, "parts": 12, "h": 32, "q": 128}, (32, 32), _six_bits),
    "Q6_K": _Block({"q": 128, "h": 64, "parts": 16, "d": 2}, (64, 32), _signed),
    "IQ4_NL": _Block({"d": 2, "q": 16}, (16,)),
    "IQ4_XS": _Block({"d": 2, "parts": 6, "q": 128}, (16,), _four_and_two_bits),
    "MXFP4": _Block({"d": 1, "q": 16}, (16,)),
}
QUANTISED_TYPES: Mapping[str, tuple[int, int]] = {
    name: (NUMBER_FORMATS[name].inputs, sum(block.fields.values())) for name, block in _BLOCKS.items()
}
"""Numbers and bytes of a block, by supported quantised type."""


def numbers_of(rows: Array, kind: str) -> Numbers:
    """Decode rows of blocks, uint8 `[rows, bytes of a row]`."""
    form, block, (_, size) = NUMBER_FORMATS[kind], _BLOCKS[kind], QUANTISED_TYPES[kind]
    blocks, found, begin = rows.reshape(-1, size), dict[str, Array](), 0
    for name, length in block.fields.items():
        found[name] = blocks[:, begin : (begin := begin + length)]
    codes, shift = np.zeros((), np.uint8), 0
    for plane, bits, run in zip("qh", form.planes, block.runs, strict=False):
        codes = codes | _spread(found[plane], bits, run) << np.uint8(shift)
        shift += bits
    if kind == "Q8_0":
        codes ^= 0x80  # signed integers
    scales, minimums = found["d"].copy(), found["m"].copy().view(np.uint16) if form.has_minimum else None
    if minimums is not None and block.adds:
        minimums ^= 0x8000
    parts, of_minimums = block.parts(found["parts"]) if block.parts else (None, None)
    count = len(rows)
    return Numbers(
        form,
        codes.reshape(count, -1, GROUP),
        (scales if form.exponents else scales.view(np.float16)).reshape(count, -1),
        None if parts is None else parts.view(np.int8).reshape(count, -1, form.halves),
        None if minimums is None else minimums.view(np.float16).reshape(count, -1),
        None if of_minimums is None else of_minimums.reshape(count, -1, form.halves),
    )


def _spread(content: Array, bits: int, run: int) -> Array:
    """The codes of `bits` bits in rows of bytes, `[rows, codes]`; `run` is as in `_Block`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = content.reshape(len(content), -1, 1, run)
    return ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(len(content), -1)
