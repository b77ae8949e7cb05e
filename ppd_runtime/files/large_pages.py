"""Keeps files in memory in pages of 2 MB, if Linux can: a pass over weights in small ones is slower."""

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from ppd_runtime.host import memory_bytes

LARGE_PAGE = 2**21
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14: an unreadable disk is an error, and no signal


def read_in_large_pages(path: Path) -> None:
    """Have the system read a file into memory in large pages, if it can; later mappings get these.

    `read` uses small pages, and so may earlier writers and readers of the file: what is in small pages is read again. A
    file of less than a large page, or of more than half the memory, is left alone.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not LARGE_PAGE <= path.stat().st_size <= memory_bytes() / 2:
        return
    with (
        contextlib.suppress(OSError),  # a kernel, a file system or a container without them
        path.open("rb") as file,
        contextlib.closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as memory,
    ):
        memory.madvise(mmap.MADV_HUGEPAGE)
        if not _populated(memory, len(memory)):
            _evict(file.fileno(), memory, LARGE_PAGE)
            if _populated(memory, LARGE_PAGE):  # so it helps to read again
                _evict(file.fileno(), memory, len(memory))
                _populated(memory, len(memory))


def in_large_pages(address: int) -> bool:
    """Whether most of the mapped file at an address of this process, as far as it has been read, is in large pages."""
    counts = dict[str, int]()
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    inside = False
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, end = name.partition("-")
            inside = int(first, 16) <= address < int(end, 16)
        elif inside and name in ("Rss:", "FilePmdMapped:"):
            counts[name] = int(rest.split()[0])
    return counts.get("FilePmdMapped:", 0) > counts.get("Rss:", 0) / 2


def _populated(memory: mmap.mmap, num_bytes: int) -> bool:
    """Read the first `num_bytes`; true if they are in large pages."""
    memory.madvise(_POPULATE_READ, 0, num_bytes)
    return in_large_pages(np.frombuffer(memory, np.uint8).ctypes.data)


def _evict(file: int, memory: mmap.mmap, num_bytes: int) -> None:
    """Drop the first `num_bytes`, which the system keeps while any process maps them."""
    memory.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(file, 0, num_bytes, os.POSIX_FADV_DONTNEED)
