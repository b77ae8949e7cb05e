"""Keeps copies of models' weights in the user's cache folder, for all processes of a host to map into memory: in
another dtype than the model's files, and in a form that Linux can map in large pages.

A copy is a safetensors file, padded to whole pages. Its tensors begin at the processor's cache lines if their sizes
allow it. Each start reads a copy once, to check that it is whole.
"""

import contextlib
import json
import logging
import math
import mmap
import os
import platform
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppd_runtime.files.cache_folder import cache_folder, ingredients_name, with_way_out
from ppd_runtime.files.checksummed import (
    BLOCK,
    CHECKED,
    UNFINISHED,
    find,
    find_alone,
    note_whole,
    of_blocks,
    only_one,
    unfinished,
    version_of,
)
from ppd_runtime.files.large_pages import LARGE_PAGE
from ppd_runtime.models.native.products import in_tiles

logger = logging.getLogger(__name__)
SMALLEST_BYTES = 2**24
"""Smaller copies of a model are not kept; each process may have its own."""
SETTLED_S = 2.0
"""Files written more recently are not copied: another write could have the same time."""
_UNUSED_S = 14 * 24 * 3600.0
_ORPHANED_S = 600.0
"""Making a copy removes copies unused for `_UNUSED_S`, or for `_ORPHANED_S` if the model has gone or changed, and
leftovers of killed makers."""
_FORMAT = 2
_SUFFIX = ".safetensors"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in _NAMES.items()} | {"U8": torch.uint8}
_ALL_NAMES = _NAMES | {torch.uint8: "U8"}
_LENGTH, _LINE = 8, 64
_MAP = {"flags": mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)} if hasattr(mmap, "MAP_PRIVATE") else {}
_Stored = dict[str, tuple[torch.dtype | None, list[int]]]
"""Dtype and shape by name; the dtype is None if it is no floating one."""
Order = Callable[[Iterable[str]], Sequence[str]]


def kept_copies(
    files: Sequence[Path],
    dtype: torch.dtype,
    order: Order = list,
    tiled: bool = False,
    may_round: Callable[[], bool] = lambda: False,
) -> dict[Path, Path]:
    """Copies of a model's safetensors files with all numbers in `dtype`, by original; made if they are missing.

    Empty if readers should read the files instead: the copies would be smaller than `SMALLEST_BYTES`, `dtype` cannot
    hold every number, a file cannot be read, there is no room, or no folder to keep them in. A damaged copy is made
    again.

    Args:
        order: sorts a file's tensors' names in the order in which they are read: sequential reads are faster.
        tiled: matrices are laid out by `in_tiles`, and the files already have `dtype`.
        may_round: whether numbers that `dtype` cannot hold may be rounded to it, whichever tensor they are in.
    """
    try:
        versions = {path: version_of(path) for path in files}
        stored = {path: _stored(path) for path in files}
    except (OSError, SafetensorError):
        return {}  # reading them gives a better error
    kinds = {kind for of_file in stored.values() for kind, _ in of_file.values()}
    num_bytes = sum(_num_bytes(of_file, dtype) for of_file in stored.values())
    if not kinds | {dtype} <= set(_NAMES) or num_bytes < SMALLEST_BYTES:
        return {}
    if tiled != (kinds == {dtype}) or not (tiled or dtype == torch.float32 or may_round()):
        return {}
    try:
        folder = cache_folder()
        names = {path: _name(path, versions[path], dtype, tiled) for path in files}
        copies = {path: copy for path in files if (copy := find(folder, names[path], _SUFFIX))}
        missing = [path for path in files if path not in copies]
        if not _settled(missing):
            return {}
        _check_room(sum(_num_bytes(stored[path], dtype) for path in missing))
        for path in missing:
            copies[path] = _made(path, versions[path], dtype, order, tiled, folder, names[path])
    except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        reason = with_way_out(error)
        logger.warning("each process reads %s for itself, for no copy can be kept: %s", files[0].parent, reason)
        return {}
    return copies


def map_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """A kept copy's tensors by name, in memory that all processes share until they write to it.

    Raises:
        ValueError: for a damaged file.
        OSError: if it cannot be mapped.
    """
    with path.open("rb") as file:
        if not (size := os.fstat(file.fileno()).st_size):
            raise ValueError(f"{path} is damaged: it is empty")
        memory = mmap.mmap(file.fileno(), 0, **_MAP) if _MAP else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # before anything is read, so that it is read that way
    try:
        data_at = _LENGTH + int.from_bytes(memory[:_LENGTH], "little")
        header = json.loads(memory[_LENGTH:data_at])
        header.pop("__metadata__", None)
        if data_at + max((field["data_offsets"][1] for field in header.values()), default=0) != size:
            raise ValueError(f"it has {size} bytes")
        tensors = {name: _tensor(memory, data_at, field) for name, field in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    yield from tensors.items()


def _stored(path: Path) -> _Stored:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is no mapping)
        return {name: (DTYPES.get(part.get_dtype()), list(part.get_shape())) for name, part in slices.items()}


def _num_bytes(stored: _Stored, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for _, shape in stored.values()) * dtype.itemsize


def _name(path: Path, version: list[int], dtype: torch.dtype, tiled: bool) -> str:
    what = {"of": str(path.resolve()), "version": version, "dtype": str(dtype), "tiled": tiled, "format": _FORMAT}
    return ingredients_name(what)


def _settled(files: Iterable[Path]) -> bool:
    return all(abs(time.time() - path.stat().st_mtime) > SETTLED_S for path in files)


def _check_room(num_bytes: int) -> None:
    """Remove unused copies; raise ValueError if new ones would take more than half of the free space."""
    if not num_bytes:
        return
    for old in [path for path in cache_folder().iterdir() if path.name.endswith((_SUFFIX, UNFINISHED, CHECKED))]:
        with contextlib.suppress(OSError):  # another removes it
            kept_s = _UNUSED_S if old.suffix == _SUFFIX and _is_of_use(old) else _ORPHANED_S
            if time.time() - old.stat().st_mtime > kept_s:
                old.unlink()  # a process that has mapped it keeps it
    free = shutil.disk_usage(cache_folder()).free
    if free < 2 * num_bytes:
        raise ValueError(f"{_size(num_bytes)} would leave too little of the {_size(free)} that are free")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _is_of_use(copy: Path) -> bool:
    """Whether the source of a copy still exists unchanged, as far as this host can tell."""
    try:
        with safe_open(copy, "pt") as file:
            about = file.metadata() or {}
        return about.get("host") != platform.node() or about["version"] == str(version_of(Path(about["made_of"])))
    except FileNotFoundError:
        return False
    except (OSError, KeyError, SafetensorError):
        return True


def _made(
    path: Path,
    version: list[int],
    dtype: torch.dtype,
    order: Order,
    tiled: bool,
    folder: Path,
    name: str,
) -> Path:
    """The copy, made by this process or by one that was quicker."""
    with only_one(folder, name):
        return find_alone(folder, name, _SUFFIX) or _make(path, version, dtype, order, tiled, folder / name)


def _make(path: Path, version: list[int], dtype: torch.dtype, order: Order, tiled: bool, stem: Path) -> Path:
    logger.info("keeping a copy of %s in %s", path, dtype)
    with unfinished(stem.with_name(f"{stem.name}{_SUFFIX}")) as new:
        with safe_open(path, "pt") as file, new.open("wb") as out:
            sums = []
            for block in _blocks(_content(file, dtype, order, tiled, path, version)):
                out.write(block)  # Linux caches it in pages as large as each write
                sums.append(zlib.crc32(block))
            out.flush()
            os.fsync(out.fileno())  # else a crash leaves a file that is half empty
        if version_of(path) != version:
            raise ValueError(f"{path} has changed meanwhile; the next start makes one")
        copy = stem.with_name(f"{stem.name}-{of_blocks(sums)}{_SUFFIX}")
        new.replace(copy)
    note_whole(copy)
    return copy


def _content(
    file: Any, dtype: torch.dtype, order: Order, tiled: bool, path: Path, version: list[int]
) -> Iterator[bytes | memoryview]:
    shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    shapes = {name: shapes[name] for name in order(shapes)}
    about = {"made_of": str(path.resolve()), "version": str(version), "host": platform.node()}
    yield header_of({name: (dtype, shape) for name, shape in shapes.items()}, about)
    for name in shapes:
        tensor = file.get_tensor(name).to(dtype)
        yield bytes_of(in_tiles(tensor) if tiled and tensor.dim() in (2, 3) else tensor)


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[bytearray]:
    """The pieces joined and cut into blocks; the last one may be shorter."""
    pending = bytearray()
    for piece in pieces:
        pending += piece
        while len(pending) >= BLOCK:
            yield pending[:BLOCK]
            del pending[:BLOCK]
    if pending:
        yield pending


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """The header of a safetensors file with these tensors, by dtype and shape, in order. It aligns the tensors for
    `map_tensors`; `about` is text for readers."""
    fields: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _ALL_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    page, behind = (_LINE, 0) if end % _LINE or end < LARGE_PAGE else (LARGE_PAGE, end)
    text += b" " * (-(_LENGTH + len(text) + behind) % page)  # the file's end would not be in a large page
    return len(text).to_bytes(_LENGTH, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers as bytes of a file."""
    numbers: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return numbers


def _tensor(memory: mmap.mmap, data_at: int, field: dict[str, Any]) -> Tensor:
    dtype, shape = DTYPES[field["dtype"]], field["shape"]
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=data_at + field["data_offsets"][0]).view(shape)
