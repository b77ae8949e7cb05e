"""Builds this folder's C++ code for this CPU and loads it; compiled code or Python calls it with tensors."""

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.files.cache_folder import artifact, capabilities

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
_FOR_THIS_CPU = ("-march=native", "-mcpu=native", "")
"""Compiler flags, in the order in which they are tried."""
_OF_A_CPU = {"model name", "flags", "CPU implementer", "CPU part", "Features"}
_FIRST_WITH_SHIMS = (2, 8)  # the version of PyTorch whose compiled code can call an operator of ours directly
_HANDLE = "AtenTensorHandle"
_loading = threading.Lock()


def is_float32_on_cpu(device: torch.device | str, dtype: torch.dtype) -> bool:
    """What the code is for."""
    return torch.device(device).type == "cpu" and dtype == torch.float32


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled code uses ours: in float32, on CPUs whose numbers begin with their lowest byte, on Linux."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    fits = is_float32_on_cpu(device, dtype) and sys.byteorder == "little"
    return fits and sys.platform == "linux" and version >= _FIRST_WITH_SHIMS


class Operator:
    """A function of the C++ code that takes tensors, then numbers, and gives a new tensor.

    Args:
        name: the C++ function is `aoti_torch_cpu_NAME`, PyTorch's operator `ppd_runtime::NAME`.
        tensors: names of its tensors.
        numbers: names of its numbers, float64.
        alike: makes, from the inputs, a tensor with the result's shape and strides, on any device.
    """

    def __init__(self, name: str, tensors: Sequence[str], numbers: Sequence[str], alike: Callable[..., Tensor]) -> None:
        self._name, self._tensors, self._numbers, self._alike = name, tuple(tensors), tuple(numbers), alike
        self._defining = threading.Lock()
        self._library: torch.library.Library | None = None  # its definitions go with it

    @property
    def shim(self) -> str:
        """Its C declaration."""
        arguments = [_HANDLE] * len(self._tensors) + ["double"] * len(self._numbers) + [f"{_HANDLE}*"]
        return f"AOTITorchError {self._function}({', '.join(arguments)})"

    @property
    def _function(self) -> str:
        return f"aoti_torch_cpu_{self._name}"

    def __call__(self, *arguments: Any) -> Tensor:
        """Its result for tensors and numbers.

        Raises:
            ValueError: for dtypes and shapes that it is not made for.
        """
        from torch._C import _aoti

        tensors = [a for a in arguments if isinstance(a, Tensor)]
        handles = _handles(tensors)
        numbers = [ctypes.c_double(a) for a in arguments[len(tensors) :]]
        result = ctypes.c_void_p()
        failed = getattr(load(), self._function)(*handles, *numbers, ctypes.byref(result))
        for handle in handles:
            load().aoti_torch_delete_tensor_object(handle)
        if failed:
            given = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in zip(self._tensors, tensors, strict=True))
            raise ValueError(f"{self._name}: not made for {given}")
        (tensor,) = _aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(result)])  # one alone it copies, and keeps
        return tensor

    def in_graphs(self) -> Any:
        """This function as an operator of PyTorch's, for graphs. Running it needs the code, making a graph does not."""
        with self._defining:
            if self._library is None:
                of_tensors, of_numbers = (f"Tensor {n}" for n in self._tensors), (f"float {n}" for n in self._numbers)
                library = torch.library.Library("ppd_runtime", "FRAGMENT")
                library.define(f"{self._name}({', '.join([*of_tensors, *of_numbers])}) -> Tensor")
                library.impl(self._name, self, "CPU")
                library.impl(self._name, self._alike, "Meta")
                self._library = library
        return getattr(torch.ops.ppd_runtime, self._name).default


def load() -> ctypes.CDLL:
    """The code, loaded so that other compiled code finds it; the first time on a machine it is compiled.

    Raises:
        ValueError: if that fails.
    """
    with _loading:
        return _loaded()


def is_loaded() -> bool:
    """Whether the code is here without a wait."""
    return bool(_loaded.cache_info().currsize)


def load_meanwhile() -> None:
    """Load the code in another thread, which may take ten seconds; whoever needs it waits."""

    def begin() -> None:
        with contextlib.suppress(ValueError):  # `load` raises again
            load()

    threading.Thread(target=begin, name="native code", daemon=True).start()


@cache
def _loaded() -> ctypes.CDLL:
    files = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
    ingredients = {
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        "flags": _FLAGS,
        "machine": [platform.machine(), cpu_description(), *capabilities(torch.device("cpu"))],
        "versions": [torch.__version__],
    }
    path = artifact(ingredients, _build, ".so")
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ValueError(f"compile: {path} cannot be loaded ({error}); remove it to have it made again") from error


def cpu_description() -> list[str]:
    """What Linux says of the first core's make and abilities; empty if it says nothing."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return []
    return sorted(line for line in first.splitlines() if line.split("\t")[0].strip(" :") in _OF_A_CPU)


def cpp_compiler() -> str:
    """The compiler's command; ValueError if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import, only compiling needs it

    try:
        return get_cpp_compiler()
    except RuntimeError as error:
        raise ValueError("compile: no C++ compiler here; install g++, set CXX, or leave compile out") from error


def _build(path: Path) -> None:
    errors = []
    for cpu in _FOR_THIS_CPU:
        error = _compile_units(path, [cpu] if cpu else [])
        if not error:
            return
        errors.append(error)
    raise ValueError(f"compile: our C++ code cannot be: {errors[0]}")


def _compile_units(path: Path, flags: list[str]) -> str:
    """Compile the files in parallel and link them; returns the compiler's first error, or an empty text."""
    compiler, root = cpp_compiler(), Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="ppd-units-") as folder, ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        units = {str(Path(folder, f"{unit.stem}.o")): unit for unit in sorted(_FOLDER.glob("*.cpp"))}
        command = [compiler, *_FLAGS, *flags, f"-I{root / 'include'}"]
        commands = [[*command, "-c", str(unit), "-o", made] for made, unit in units.items()]
        link = [compiler, *_FLAGS, *flags, *units, f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(path)]
        return next(filter(None, threads.map(_run, commands)), "") or _run(link)


def _run(command: list[str]) -> str:
    """A command's error, or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (" ".join(done.stderr.split())[:300] or "it fails") if done.returncode else ""


def _handles(tensors: Sequence[Tensor]) -> list[ctypes.c_void_p]:
    from torch._C import _aoti

    return [_pointer(capsule) for capsule in _aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))]


def _pointer(capsule: object) -> ctypes.c_void_p:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    return ctypes.c_void_p(pointer(capsule, None))


def _capsule(pointer: ctypes.c_void_p) -> Any:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.argtypes, capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object
    return capsule(pointer, None, None)
