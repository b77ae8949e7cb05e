"""Free memory of a GPU by NVIDIA's management library. To ask CUDA would open a context there, which takes some 0.5 GB
for as long as the process lasts."""

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"  # a part of the driver


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def open_nvml() -> ctypes.CDLL | None:
    """The library, ready to be asked; None if this machine lacks it."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library


def free_by_nvml(library: ctypes.CDLL, uuid: Any) -> int | None:
    """Free bytes of the GPU of this UUID, as PyTorch has it; None if the library does not know it.

    It does not know parts of a GPU (MIG) by this name.
    """
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(device)):
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return int(memory.free)
