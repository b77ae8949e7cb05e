"""Whole numbers of a few bits, several in a word of 32, with a scale and a zero point for each group of inputs.

A weight is scale · (number − zero point). A difference of nine bits times a scale in float16 or bfloat16 is exact in
float32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ppd_runtime.models.checkpoint.dequantised.numbers import ScaledNumbers
from ppd_runtime.models.checkpoint.dequantised.stored import FLOATS, Matrix, StoredTensor, part

_WORD = 32
_WORDS, _LARGE = {"I32": torch.int32}, {"I64": torch.int64, "I32": torch.int32}
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each number in a word of AWQ, from the lowest bits on."""


@dataclass(frozen=True)
class Gptq:
    """`qweight` `[inputs · bits / 32, outputs]`, `qzeros` `[groups, outputs · bits / 32]`, `scales`
    `[groups, outputs]`, and perhaps `g_idx`, each input's group."""

    bits: int
    group: int | None
    """Inputs; None: all."""
    adds_one: bool
    """Whether a zero point is stored less one."""
    reorders: bool
    """Whether inputs of a group need not be neighbours, so that `g_idx` has to say which these are."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """See `Scheme`."""
        return {f"{name}.weight": self._matrix(stored, name) for name in _modules(stored, ".qweight")}

    def _matrix(self, stored: Mapping[str, StoredTensor], name: str) -> Matrix:
        rows, outputs = _two(part(stored, f"{name}.qweight", _WORDS, None))
        inputs = rows * _WORD // self.bits
        groups = _groups(name, inputs, self.group)
        zeros = (groups, _words(name, outputs, self.bits))
        parts = {
            "numbers": stored[f"{name}.qweight"],
            "zeros": part(stored, f"{name}.qzeros", _WORDS, zeros),
            "scales": part(stored, f"{name}.scales", FLOATS, (groups, outputs)),
        }
        if self.reorders or f"{name}.g_idx" in stored:
            parts["groups"] = part(stored, f"{name}.g_idx", _LARGE, (inputs,))
        return Matrix.of_numbers(parts, (outputs, inputs), partial(self._numbers, name))

    def _numbers(self, name: str, parts: Mapping[str, Tensor]) -> ScaledNumbers:
        numbers = unpacked(parts["numbers"].T, self.bits).T
        zeros = unpacked(parts["zeros"], self.bits)
        if self.adds_one:
            if bool((zeros == 2**self.bits - 1).any()):
                raise ValueError(
                    f"has a zero point of {name} stored as {2**self.bits - 1}, to which one is added: programs differ "
                    "in what that is; give a folder in the format gptq_v2"
                )
            zeros = zeros + 1
        return _scaled(name, numbers, zeros, parts["scales"], parts.get("groups"))


@dataclass(frozen=True)
class Awq:
    """`qweight` `[inputs, outputs / 8]`, `qzeros` `[groups, outputs / 8]` and `scales` `[groups, outputs]`; four bits,
    with a word's columns in an order of their own."""

    group: int | None
    """Inputs; None: all."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """See `Scheme`."""
        return {f"{name}.weight": self._matrix(stored, name) for name in _modules(stored, ".qweight")}

    def _matrix(self, stored: Mapping[str, StoredTensor], name: str) -> Matrix:
        inputs, words = _two(part(stored, f"{name}.qweight", _WORDS, None))
        outputs, groups = words * len(_AWQ_COLUMNS), _groups(name, inputs, self.group)
        parts = {
            "numbers": stored[f"{name}.qweight"],
            "zeros": part(stored, f"{name}.qzeros", _WORDS, (groups, words)),
            "scales": part(stored, f"{name}.scales", FLOATS, (groups, outputs)),
        }
        return Matrix.of_numbers(parts, (outputs, inputs), partial(self._numbers, name))

    def _numbers(self, name: str, parts: Mapping[str, Tensor]) -> ScaledNumbers:
        numbers, zeros = (_in_columns(unpacked(parts[role], 4)) for role in ("numbers", "zeros"))
        return _scaled(name, numbers, zeros, parts["scales"], None)


@dataclass(frozen=True)
class CompressedTensors:
    """`weight_packed` `[outputs, inputs · bits / 32]`, `weight_scale` `[outputs, groups]` and perhaps
    `weight_zero_point` `[outputs · bits / 32, groups]`, numbers and zero points stored plus half of their range."""

    bits: int
    group: int | None
    """Inputs; None: all."""
    has_zeros: bool
    reorders: bool
    """See `Gptq`."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """See `Scheme`."""
        return {f"{name}.weight": self._matrix(stored, name) for name in _modules(stored, ".weight_packed")}

    def _matrix(self, stored: Mapping[str, StoredTensor], name: str) -> Matrix:
        outputs, words = _two(part(stored, f"{name}.weight_packed", _WORDS, None))
        shape = part(stored, f"{name}.weight_shape", _LARGE, (2,))
        inputs = int(shape.whole()[1])
        if shape.whole().tolist() != [outputs, inputs] or _words(name, inputs, self.bits) != words:
            raise ValueError(f"has {shape.name} {shape.whole().tolist()} for {words} words in each of {outputs} rows")
        groups = _groups(name, inputs, self.group)
        parts = {
            "numbers": stored[f"{name}.weight_packed"],
            "scales": part(stored, f"{name}.weight_scale", FLOATS, (outputs, groups)),
            "shape": shape,
        }
        if self.has_zeros:
            zeros = (_words(name, outputs, self.bits), groups)
            parts["zeros"] = part(stored, f"{name}.weight_zero_point", _WORDS, zeros)
        if self.reorders:
            parts["groups"] = part(stored, f"{name}.weight_g_idx", _LARGE, (inputs,))
        return Matrix.of_numbers(parts, (outputs, inputs), partial(self._numbers, name))

    def _numbers(self, name: str, parts: Mapping[str, Tensor]) -> ScaledNumbers:
        numbers, scales = unpacked(parts["numbers"], self.bits).T, parts["scales"].T
        middle = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.int32)
        zeros = unpacked(parts["zeros"].T, self.bits) if self.has_zeros else middle
        return _scaled(name, numbers, zeros, scales, parts.get("groups"))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers in words, int32 `[rows, words]`, from the lowest bits on: int32 `[rows, words · 32 / bits]`."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).reshape(len(words), -1)


def _in_columns(numbers: Tensor) -> Tensor:
    """The numbers of AWQ's words in the order of their columns."""
    of_words = numbers.reshape(len(numbers), -1, len(_AWQ_COLUMNS))
    return torch.empty_like(of_words).index_copy_(2, torch.tensor(_AWQ_COLUMNS), of_words).reshape(numbers.shape)


def _scaled(name: str, numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None) -> ScaledNumbers:
    """A matrix of numbers `[inputs, outputs]`, and what their groups have `[groups, outputs]`."""
    if groups is None:
        groups = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    groups = groups.long()
    if int(groups.min()) < 0 or int(groups.max()) >= len(scales):
        raise ValueError(f"has inputs of {name} in groups {int(groups.min())} to {int(groups.max())} of {len(scales)}")
    return ScaledNumbers((numbers - zeros[groups]).T.contiguous(), scales.T, groups)


def _modules(stored: Mapping[str, StoredTensor], suffix: str) -> Sequence[str]:
    return [name.removesuffix(suffix) for name in stored if name.endswith(suffix)]


def _two(of: StoredTensor) -> tuple[int, int]:
    """The shape of a matrix."""
    if len(of.shape) != 2 or 0 in of.shape:
        raise ValueError(f"has {of.name} of shape {list(of.shape)}, no matrix")
    return of.shape[0], of.shape[1]


def _groups(name: str, inputs: int, group: int | None) -> int:
    """The number of groups of a module's inputs."""
    if inputs % (group or inputs):
        raise ValueError(f"has {name} with {inputs} inputs, no multiple of its group_size, {group}")
    return inputs // (group or inputs)


def _words(name: str, numbers: int, bits: int) -> int:
    """The number of words that hold so many numbers."""
    if numbers * bits % _WORD:
        raise ValueError(f"has {name} with {numbers} numbers of {bits} bits in a row, which fill no whole words")
    return numbers * bits // _WORD
