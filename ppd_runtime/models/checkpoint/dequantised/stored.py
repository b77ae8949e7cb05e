"""Tensors of files by what their headers say, and matrices whose floats are computed from several of them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppd_runtime.models.checkpoint.dequantised.numbers import ScaledNumbers
from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.models.native.formats import Numbers

Shape = tuple[int, ...]
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What tensors that are not quantised, and scales, may be stored in."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    path: Path
    name: str
    dtype: str
    """Its name in safetensors."""
    shape: Shape

    def whole(self) -> Tensor:
        """Its numbers."""
        return self._read(lambda file: file.get_tensor(self.name))

    def part(self, place: int) -> Tensor:
        """The numbers at one place of its first dimension."""
        return self._read(lambda file: file.get_slice(self.name)[place])

    def _read(self, read: Callable[[Any], Any]) -> Tensor:
        try:
            with safe_open(self.path, "pt") as file:
                found: Tensor = read(file)
                return found
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot be read: {self.name} of {self.path.name}: {one_line(error)}") from error


@dataclass(frozen=True)
class Matrix:
    """A matrix, or several stacked ones, that is computed from the tensors of its files."""

    parts: Mapping[str, StoredTensor]
    """By what they are to `floats`."""
    shape: Shape
    floats: Callable[[Mapping[str, Tensor]], Tensor]
    """Computes one matrix in float32 from its parts."""
    numbers: Callable[[Mapping[str, Tensor]], ScaledNumbers] | None = None
    """What `floats` multiplies; None if no format of few bits may hold that."""

    @staticmethod
    def of_numbers(
        parts: Mapping[str, StoredTensor], shape: Shape, numbers: Callable[[Mapping[str, Tensor]], ScaledNumbers]
    ) -> "Matrix":
        """A matrix of numbers and scales."""
        return Matrix(parts, shape, lambda parts: numbers(parts).in_floats(), numbers)

    def packed(self) -> Numbers | None:
        """The matrix by `ScaledNumbers.packed`."""
        return self.numbers({role: of.whole() for role, of in self.parts.items()}).packed() if self.numbers else None

    def pieces(self) -> Iterator[Tensor]:
        """The matrix, or each of the stacked ones, in float32."""
        if len(self.shape) == 2:
            yield self.floats({role: part.whole() for role, part in self.parts.items()})
            return
        for place in range(self.shape[0]):
            yield self.floats({role: part.part(place) for role, part in self.parts.items()})


class Scheme(Protocol):
    """How a program stores a quantised matrix."""

    def matrices(self, stored: Mapping[str, StoredTensor]) -> dict[str, Matrix]:
        """The matrices in these tensors, by the names that they would have as floats.

        Raises:
            ValueError: for a part that is missing or does not fit, in words that follow a model's name.
        """


def part(stored: Mapping[str, StoredTensor], name: str, kinds: Mapping[str, Any], shape: Shape | None) -> StoredTensor:
    """The tensor with this name; ValueError if it is missing, of another kind, or of another shape than this one."""
    if name not in stored:
        raise ValueError(f"lacks {name}")
    found = stored[name]
    if found.dtype not in kinds or (shape is not None and found.shape != shape):
        wanted = "/".join(kinds) + (f" {list(shape)}" if shape is not None else "")
        raise ValueError(f"has {name} as {found.dtype} {list(found.shape)}, not as {wanted}")
    return found


def stored_tensors(paths: list[Path]) -> dict[str, StoredTensor]:
    """The tensors of these files, by name; ValueError for a file that cannot be read."""
    found = dict[str, StoredTensor]()
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    about = file.get_slice(name)
                    found[name] = StoredTensor(path, name, about.get_dtype(), tuple(about.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot be read: {path.name}: {one_line(error)}") from error
    return found
