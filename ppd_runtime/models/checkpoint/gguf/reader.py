"""Reads a GGUF file's metadata and where its tensors lie.

Every length, count and offset is compared with the file's size before anything is read or allocated. The format is
described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from ppd_runtime.models.checkpoint.gguf.blocks import QUANTISED_TYPES

Value: TypeAlias = int | float | bool | str | list[str] | np.ndarray[Any, Any]
"""Metadata: a number, a text, texts, or an array of numbers."""

BLOCKS: Mapping[str, tuple[int, int]] = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), **QUANTISED_TYPES}
"""Numbers and bytes of a block, by supported tensor type."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""Names of a model's parts."""
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_ALIGNMENT = 32  # bytes, if the file names no other
_MOST_HEADER = 2**27  # bytes before the tensors' own
_MOST_TEXT, _MOST_NAME = 2**24, 2**8  # bytes
_MOST_VALUES = 2**22  # in an array
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    file: Path
    name: str
    kind: str
    """Its type, such as Q8_0."""
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    start: int
    """Its first byte, from the beginning of the file."""
    num_bytes: int | None
    """Its size in bytes; None for an unsupported type."""

    @property
    def rows(self) -> int:
        """Rows; in a vector each number is one."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, if the type is supported."""
        return (self.num_bytes or 0) // self.rows


@dataclass(frozen=True)
class GGUF:
    """A file's metadata by key and its tensors by name, in the file's order."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def parts_of(path: Path) -> list[Path]:
    """The files of a model, found by the name of one; raises ValueError if one is missing."""
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    stem, _, count, suffix = found.groups()
    parts = list[Path]()
    for number in range(1, int(count) + 1):
        part = path.with_name(f"{stem}-{number:05}-of-{count}{suffix}")
        if not part.is_file():
            raise ValueError(f"lacks its part {part.name}, which has to lie beside the others")
        parts.append(part)
    return parts or [path]


def read_gguf(path: Path) -> GGUF:
    """Read the header of a file, or of all parts of a model if this is one; reads no tensors' numbers.

    Raises:
        ValueError: for a file that is not GGUF, has another version or byte order, is cut short, or contradicts itself;
            for a part that is missing or does not belong to the others.
    """
    paths = parts_of(path)
    if len(paths) == 1:
        whole = _read(path)
        _check_part(whole, 0, 1)
        return whole
    tensors, first = dict[str, StoredTensor](), None
    for number, each in enumerate(paths):
        try:
            part = _read(each)
            _check_part(part, number, len(paths))
            if twice := tensors.keys() & part.tensors.keys():
                raise ValueError(f"has the tensor {shown(min(twice))} of another part")
        except ValueError as error:
            raise ValueError(f"has a part, {each.name}, that {error}") from error
        first = first or part
        tensors |= part.tensors
    assert first
    if first.metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise ValueError(f"is damaged: its parts have {len(tensors)} tensors, not as many as they say")
    return GGUF(path, first.metadata, tensors)


def _read(path: Path) -> GGUF:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _Reader(file, size).gguf(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error


def _check_part(part: GGUF, number: int, count: int) -> None:
    """Check a file's part number against its name."""
    said, of = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1) or 1
    if (said, of) != (number, count):
        if count == 1:
            raise ValueError(f"is one of {str(of)[:20]} parts; give it its name, NAME-00001-of-{str(of)[:20]:0>5}.gguf")
        raise ValueError(f"is part {number + 1} of {count} by its name, and not by what it says")


def shown(name: str) -> str:
    """A name out of a file, for one line of an error."""
    return repr(name if len(name) <= 80 else f"{name[:80]}…")


class _Reader:
    """A file's header, read from its beginning to its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def gguf(self, path: Path) -> GGUF:
        self._begin()
        num_tensors, num_values = self._count(24), self._count(13)
        metadata = dict[str, Value]()
        for _ in range(num_values):
            key = self._text(_MOST_NAME, "key")
            if key in metadata:
                raise ValueError(f"has the key {shown(key)} twice")
            metadata[key] = self._value(self._number("I"))
        tensors = [self._tensor(path) for _ in range(num_tensors)]
        return GGUF(path, metadata, self._placed(tensors, _alignment(metadata)))

    def _begin(self) -> None:
        if self._bytes(min(4, self._size)) != _MAGIC:
            raise ValueError("is no GGUF file")
        version = self._number("I")
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
            raise ValueError("is a big-endian GGUF file, which is not read; give one for little-endian machines")
        raise ValueError(f"has GGUF version {version}, 2 and 3 are read; convert the model again with llama.cpp")

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise ValueError("is cut short; download or convert it again")
        self._at += count
        if self._at > _MOST_HEADER:
            raise ValueError(f"has more than {_MOST_HEADER >> 20} MiB of metadata")
        content = self._file.read(count)
        if len(content) < count:
            raise ValueError("is cut short; download or convert it again")
        return content

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))
        return value

    def _count(self, least_bytes: int, most: int = _MOST_VALUES) -> int:
        """How many entries follow, each of at least `least_bytes` bytes."""
        count: int = self._number("Q")
        if count > most or count * least_bytes > self._size - self._at:
            raise ValueError(f"is cut short or damaged: it says that {count} entries follow")
        return count

    def _text(self, most: int, what: str) -> str:
        length = self._number("Q")
        if length > most:
            raise ValueError(f"is damaged: a {what} of {length} bytes")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"is damaged: a {what} is no UTF-8") from error

    def _value(self, kind: int) -> Value:
        if kind == _TEXT:
            return self._text(_MOST_TEXT, "text")
        if kind != _ARRAY:
            return self._scalar(kind)
        kind = self._number("I")
        if kind == _TEXT:
            return [self._text(_MOST_TEXT, "text") for _ in range(self._count(8))]
        dtype = np.dtype("<u1" if kind == _BOOL else f"<{_code(kind)}")
        count = self._count(dtype.itemsize)
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _scalar(self, kind: int) -> int | float | bool:
        if kind != _BOOL:
            value: int | float = self._number(_code(kind))
            return value
        if (truth := self._number("B")) > 1:
            raise ValueError(f"is damaged: a truth value of {truth}")
        return bool(truth)

    def _tensor(self, path: Path) -> StoredTensor:
        """A tensor; its `start` counts from where tensors' bytes begin."""
        name = self._text(_MOST_NAME, "name")
        dimensions = self._number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"is damaged: tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number = self._number("I")
        kind = _type_name(number)
        start = self._number("Q")
        if not all(shape):
            raise ValueError(f"is damaged: tensor {shown(name)} is empty")
        if kind not in BLOCKS:
            return StoredTensor(path, name, kind, shape, start, None)
        numbers, size = BLOCKS[kind]
        if shape[-1] % numbers:
            raise ValueError(f"is damaged: tensor {shown(name)} in {kind} has rows of {shape[-1]} numbers")
        return StoredTensor(path, name, kind, shape, start, math.prod(shape) // numbers * size)

    def _placed(self, tensors: Iterable[StoredTensor], alignment: int) -> dict[str, StoredTensor]:
        """The tensors by name, with checked places in the file."""
        data_at = self._at + -self._at % alignment
        found, end = dict[str, StoredTensor](), data_at
        for tensor in tensors:
            if tensor.name in found:
                raise ValueError(f"has the tensor {shown(tensor.name)} twice")
            if tensor.start % alignment:
                raise ValueError(f"is damaged: tensor {shown(tensor.name)} begins between multiples of {alignment}")
            start = data_at + tensor.start
            found[tensor.name] = replace(tensor, start=start)
        for tensor in sorted(found.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise ValueError(f"is damaged: tensor {shown(tensor.name)} overlaps another one")
            end = tensor.start + (tensor.num_bytes or 1)
            if end > self._size:
                raise ValueError(f"is cut short: tensor {shown(tensor.name)} lies beyond its end")
        return found


def _type_name(number: int) -> str:
    """The name of a tensor type."""
    import gguf  # only a file that is opened for the first time needs it

    numbers = gguf.GGMLQuantizationType
    return numbers(number).name if number in list(numbers) else f"type {number}"


def _code(kind: int) -> str:
    """`struct`'s code of a number type."""
    if kind == _ARRAY:
        raise ValueError("has arrays of arrays in its metadata, which are not read")
    if kind not in _NUMBERS:
        raise ValueError(f"is damaged: metadata of type {kind}")
    return _NUMBERS[kind]


def _alignment(metadata: Mapping[str, Value]) -> int:
    """Tensors start at multiples of these bytes."""
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in [2**power for power in range(3, 21)]:
        raise ValueError(f"is damaged: general.alignment is {str(alignment)[:40]}")
    return alignment
