"""Formats of weights of few bits: which numbers a matrix holds, by llama.cpp's names, and the weights they stand for.

A group is 32 neighbouring inputs of a row. Each input has a code of a few bits, which stands for a whole number. A
block is one group or eight; it has a scale and perhaps a minimum. In blocks of eight groups each group, or each half of
it, has a whole number by which the block's scale is multiplied, and perhaps one for its minimum. A weight is
scale · its whole number · the code's, less minimum · its whole number, each step in float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GROUP = 32
"""Neighbouring inputs that share a scale."""
Array = np.ndarray[Any, Any]
_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice what they stand for


@dataclass(frozen=True)
class NumberFormat:
    """What a matrix in a format holds."""

    name: str
    number: int
    """llama.cpp's, which names the format in files and in C++."""
    planes: Sequence[int]
    """Bits of a code that lie together, the lowest ones first."""
    values: Sequence[int]
    """The whole number that each code stands for."""
    groups: int = 1
    """Groups in a block."""
    halves: int = 0
    """Parts of a group with a whole number for the scale; 0: the block's scale is the group's."""
    has_minimum: bool = False
    shares_bytes: bool = False
    """Whether a half's whole numbers, for scale and minimum, have four bits each."""
    exponents: bool = False
    """Whether a scale is a power of two, in a byte, instead of a number in float16."""
    table: Array = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.values, np.int8))

    @property
    def inputs(self) -> int:
        """Inputs of a block."""
        return self.groups * GROUP


def _all_formats() -> Mapping[str, NumberFormat]:
    def whole(low: int, high: int) -> Sequence[int]:
        return range(low, high)

    large: Mapping[str, Any] = {"groups": 8}
    formats = [
        NumberFormat("Q4_0", 2, (4,), whole(-8, 8)),
        NumberFormat("Q4_1", 3, (4,), whole(0, 16), has_minimum=True),
        NumberFormat("Q5_0", 6, (4, 1), whole(-16, 16)),
        NumberFormat("Q5_1", 7, (4, 1), whole(0, 32), has_minimum=True),
        NumberFormat("Q8_0", 8, (8,), whole(-128, 128)),
        NumberFormat("Q2_K", 10, (2,), whole(0, 4), halves=2, has_minimum=True, shares_bytes=True, **large),
        NumberFormat("Q3_K", 11, (2, 1), whole(-4, 4), halves=2, **large),
        NumberFormat("Q4_K", 12, (4,), whole(0, 16), halves=1, has_minimum=True, **large),
        NumberFormat("Q5_K", 13, (4, 1), whole(0, 32), halves=1, has_minimum=True, **large),
        NumberFormat("Q6_K", 14, (4, 2), whole(-32, 32), halves=2, **large),
        NumberFormat("IQ4_NL", 20, (4,), _CURVE),
        NumberFormat("IQ4_XS", 23, (4,), _CURVE, halves=1, **large),
        NumberFormat("MXFP4", 39, (4,), _FP4, exponents=True),
    ]
    return {each.name: each for each in formats}


NUMBER_FORMATS = _all_formats()
"""The formats by name."""


@dataclass(frozen=True)
class Numbers:
    """What some rows of a matrix hold."""

    form: NumberFormat
    codes: Array
    """uint8 `[rows, groups, 32]`."""
    scales: Array
    """float16 `[rows, blocks]`, or uint8 for exponents."""
    parts: Array | None = None
    """Whole numbers of halves, by which scales are multiplied: int8 `[rows, groups, halves]`."""
    minimums: Array | None = None
    """float16 `[rows, blocks]`."""
    minimum_parts: Array | None = None
    """Whole numbers by which minimums are multiplied: uint8 `[rows, groups, halves]`."""

    def some(self, rows: slice | Array) -> "Numbers":
        """What some of the rows hold."""
        return _numbers(self.form, [None if array is None else array[rows] for array in self._arrays])

    @staticmethod
    def joined(parts: "Sequence[Numbers]") -> "Numbers":
        """Join rows of one format, in the order given."""
        arrays: Any = zip(*(part._arrays for part in parts), strict=True)
        found = [None if of_parts[0] is None else np.concatenate(of_parts) for of_parts in arrays]
        return _numbers(parts[0].form, found)

    @property
    def _arrays(self) -> Sequence[Array | None]:
        return self.codes, self.scales, self.parts, self.minimums, self.minimum_parts

    @property
    def are_finite(self) -> bool:
        """Whether all are finite."""
        halves = self.minimums is None or bool(np.isfinite(self.minimums).all())
        with np.errstate(over="ignore"):
            largest = self.scales_in_floats * np.float32(np.abs(self.form.table.astype(np.int32)).max())
        return halves and bool(np.isfinite(largest).all())

    @property
    def scales_in_floats(self) -> Array:
        """float32 `[rows, blocks]`."""
        if not self.form.exponents:
            return self.scales.astype(np.float32)
        whole = self.scales.astype(np.uint32)  # 2 ** (exponent - 128), for the table's values are doubled
        return np.where(whole < 2, np.uint32(0x00200000) << whole, (whole - 1) << 23).astype(np.uint32).view(np.float32)

    @property
    def whole(self) -> Array:
        """Whole numbers that the codes stand for: int8 `[rows, groups, 32]`."""
        return self.form.table[self.codes]

    @property
    def minimums_of_halves(self) -> Array | None:
        """float32 `[rows, groups, halves]`, each one exact; None if there are none."""
        return None if self.minimums is None else self._of_halves(self.minimums.astype(np.float32), self.minimum_parts)

    def in_floats(self) -> Array:
        """The weights, float32 `[rows, inputs]`."""
        scales, minimums = self._of_halves(self.scales_in_floats, self.parts), self.minimums_of_halves
        weights = self.whole.reshape(*scales.shape, -1) * scales[..., None]
        if minimums is not None:
            weights -= minimums[..., None]
        return weights.reshape(len(weights), -1)

    def _of_halves(self, of_blocks: Array, parts: Array | None) -> Array:
        of_groups = np.repeat(of_blocks, self.form.groups, axis=1)[..., None]
        return of_groups if parts is None else of_groups * parts


def _numbers(form: NumberFormat, arrays: Sequence[Any]) -> Numbers:
    return Numbers(form, *arrays)
