"""What compiling for a GPU needs on the machine that compiles: Triton, CUDA's headers, and its driver to link with.

A machine with nothing but pip's PyTorch has the headers in several folders of the package `nvidia`, and the driver
under its full name alone. Links to them make a toolkit for the compiler.
"""

import contextlib
import ctypes
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HEADER = Path("include", "cuda.h")
_DRIVER = "libcuda.so.1"
_WAY_OUT = "or leave compile out"


def check_toolkit() -> None:
    """Raise ValueError, in one line, if PyTorch's compiler would fail for lack of Triton, CUDA's headers or driver."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"compile: code for GPUs needs Triton, which is not installed: install PyTorch for CUDA, {_WAY_OUT}"
        )
    if _has_header(home := _cuda_home()):
        return
    if not _headers():
        raise ValueError(
            f"compile: code for GPUs needs a CUDA toolkit, and there is no {_HEADER} in CUDA_HOME={home}: install "
            f"one and have CUDA_HOME name it, {_WAY_OUT}"
        )
    if _driver() is None:
        raise ValueError(f"compile: code for GPUs needs the driver's {_DRIVER}: compile where there is one, {_WAY_OUT}")


@contextlib.contextmanager
def toolkit() -> Iterator[None]:
    """Let PyTorch's compiler find a toolkit while the block lasts, if `check_toolkit` found one in parts."""
    from torch.utils import cpp_extension

    if _has_header(before := _cuda_home()):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="ppd-toolkit-") as folder:
        for part in ("include", "lib64"):
            Path(folder, part).mkdir()
        for header in (header for headers in _headers() for header in headers.iterdir()):
            with contextlib.suppress(FileExistsError):  # several packages have a file of this name
                Path(folder, "include", header.name).symlink_to(header)
        if driver := _driver():
            Path(folder, "lib64", "libcuda.so").symlink_to(driver)
        cpp_extension.CUDA_HOME = folder
        try:
            yield
        finally:
            cpp_extension.CUDA_HOME = before


def _cuda_home() -> str | None:
    from torch.utils.cpp_extension import CUDA_HOME  # takes a second to import, only compiling needs it

    return CUDA_HOME


def _has_header(home: str | None) -> bool:
    return home is not None and Path(home, _HEADER).is_file()


def _headers() -> list[Path]:
    """The folders of headers that came with PyTorch; none if CUDA's own is not among them."""
    found = importlib.util.find_spec("nvidia")
    places = map(Path, found.submodule_search_locations or []) if found else []
    folders = sorted({header.parent for place in places for header in place.glob("*/include/*.h")})
    return folders if any((folder / _HEADER.name).is_file() for folder in folders) else []


def _driver() -> Path | None:
    """The driver's file, wherever the system's linker finds it."""
    try:
        ctypes.CDLL(_DRIVER)
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = (line.split(maxsplit=5)[5] for line in lines if line.count("/") and "libcuda.so" in line)
    return next(map(Path, mapped), None)
