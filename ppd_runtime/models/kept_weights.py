"""Copies of models' weights in the user's cache folder, which all processes of a host map into their memory: in another
dtype than a model's files have, and so that Linux can map them in large pages.

A copy is a safetensors file like any other, filled up to whole pages; its tensors stand at the beginnings of the
processor's cache lines where their sizes allow that.
"""

import contextlib
import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import Tensor

from ppd_runtime.models.artifacts import artifact, cache_folder, ingredients_name

logger = logging.getLogger(__name__)
SMALLEST_BYTES = 2**24
"""Smaller copies are not kept: each process may have its own."""
_SUFFIX = ".safetensors"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
Shapes = dict[str, list[int]]
"""Tensors' shapes, by name."""
_CHUNK = 2**23
"""Bytes that are written at once: Linux keeps them in memory in as large pages as it writes."""
_LENGTH, _LINE, _LARGE_PAGE = 8, 64, 2**21
_MAKING_S = 240.0
"""Longest wait for another process that makes the same copy."""


def kept_copy(
    path: Path, dtype: torch.dtype, order: Callable[[], Iterable[str]] = tuple, most_bytes: float = math.inf
) -> Path | None:
    """A copy of a safetensors file with all its numbers in `dtype`, made where nobody has made it yet.

    `order` gives the tensors' names in the order in which they are read: one after the other they come faster.
    None where a reader had better convert for itself: the copy would be smaller than `SMALLEST_BYTES` or larger than
    `most_bytes`, there are other than floating-point numbers, no room, or no folder to keep it in.
    """
    stored = _stored(path)
    if None in {kind for kind, _ in stored.values()} or dtype not in _NAMES:
        return None
    shapes = {name: shape for name, (_, shape) in stored.items()}
    if not SMALLEST_BYTES <= _num_bytes(shapes, dtype) <= most_bytes:
        return None
    about = path.stat()
    version = [about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    ingredients = {"weights": str(path.resolve()), "version": version, "dtype": str(dtype)}
    try:
        kept = cache_folder() / f"{ingredients_name(ingredients)}{_SUFFIX}"
        with contextlib.nullcontext() if kept.exists() else FileLock(kept.with_suffix(".lock"), timeout=_MAKING_S):
            return artifact(ingredients, partial(_make, path, shapes, dtype, order), _SUFFIX)
    except (OSError, ValueError, Timeout) as error:
        logger.warning("%s is converted to %s in each process, for no copy can be kept: %s", path, dtype, error)
        return None


def stored_dtypes(path: Path) -> set[torch.dtype | None]:
    """Those of a safetensors file's tensors; None stands for all that are not floating-point numbers of these kinds."""
    return {kind for kind, _ in _stored(path).values()}


def _stored(path: Path) -> dict[str, tuple[torch.dtype | None, list[int]]]:
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a safetensors file is no mapping)
        return {name: (_DTYPES.get(part.get_dtype()), list(part.get_shape())) for name, part in slices.items()}


def map_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """A kept copy's tensors by name, in memory that all processes share until they write to it.

    Raises:
        ValueError: for a file that is none.
    """
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # before anything is read, so that it is read that way
        data_at = _LENGTH + int.from_bytes(memory[:_LENGTH], "little")
        header = json.loads(memory[_LENGTH:data_at])
        header.pop("__metadata__", None)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for name, field in header.items():
            first, end = (data_at + offset for offset in field["data_offsets"])
            yield name, flat[first:end].view(_DTYPES[field["dtype"]]).view(field["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged, remove it to have it made anew: {error}") from error


def in_large_pages(tensor: Tensor) -> bool:
    """Whether most of the mapped file that a tensor lies in, as far as it has been read, is in pages of 2 MB."""
    place, counts = tensor.data_ptr(), dict[str, int]()
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return False
    inside = False
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, end = name.partition("-")
            inside = int(first, 16) <= place < int(end, 16)
        elif inside and name in ("Rss:", "FilePmdMapped:"):
            counts[name] = int(rest.split()[0])
    return counts.get("FilePmdMapped:", 0) > counts.get("Rss:", 0) / 2


def _num_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    return sum(map(math.prod, shapes.values())) * dtype.itemsize


def _make(path: Path, shapes: Shapes, dtype: torch.dtype, order: Callable[[], Iterable[str]], copy: Path) -> None:
    shapes = {name: shapes[name] for name in order() if name in shapes} | shapes
    source, num_bytes, free = str(path.resolve()), _num_bytes(shapes, dtype), shutil.disk_usage(copy.parent).free
    if free < 2 * num_bytes:
        raise ValueError(f"{num_bytes / 1e9:.1f} GB would leave too little of the {free / 1e9:.1f} GB that are free")
    for old in cache_folder().glob(f"*{_SUFFIX}"):
        if _made_of(old) == (source, str(dtype)):
            old.unlink(missing_ok=True)  # of an earlier version of the file; whoever has mapped it keeps it
    logger.info("keeping a copy of %s in %s", path, dtype)
    with safe_open(path, "pt") as file, copy.open("wb") as out:
        pending = bytearray(_header(shapes, dtype, source))
        for name in shapes:
            pending += memoryview(file.get_tensor(name).to(dtype).contiguous().view(-1).view(torch.uint8).numpy())
            while len(pending) >= _CHUNK:
                out.write(pending[:_CHUNK])
                del pending[:_CHUNK]
        out.write(pending)
        out.flush()
        os.fsync(out.fileno())  # a file that a crash has left half empty would be taken for whole


def _header(shapes: Shapes, dtype: torch.dtype, source: str) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"made_of": source, "dtype": str(dtype)}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields).encode()
    page, behind = (_LINE, 0) if end % _LINE else (_LARGE_PAGE, end)
    text += b" " * (-(_LENGTH + len(text) + behind) % page)  # the file's end would not be in a large page
    return len(text).to_bytes(_LENGTH, "little") + text


def _made_of(copy: Path) -> tuple[str, str]:
    try:
        with safe_open(copy, "pt") as file:
            metadata = file.metadata() or {}
    except Exception:  # noqa: BLE001 (whatever is wrong with it, it is nobody's copy)
        return "", ""
    return metadata.get("made_of", ""), metadata.get("dtype", "")
