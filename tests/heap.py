"""What this process holds in memory, counted rather than measured: no page that a library keeps for later is in it."""

import ctypes
import gc
import sys
from typing import Any

import pytest


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`, in bytes."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


_mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Heap
needs_mallinfo2 = pytest.mark.skipif(_mallinfo2 is None, reason="needs glibc 2.33")


def in_use() -> tuple[int, int]:
    """Bytes that C, C++ and Rust have asked for and not given back, in all threads; blocks of Python's own heap."""
    gc.collect()
    found = _mallinfo2()
    return found.uordblks + found.hblkhd, sys.getallocatedblocks()
