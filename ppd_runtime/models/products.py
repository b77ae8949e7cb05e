"""Products of a few tokens' states with a weight matrix, in code of our own; `few_rows.cpp` says how it works.

A core reads each weight once for up to six tokens, and a token's bits do not depend on the tokens beside it.
"""

import contextlib
import ctypes
import hashlib
import mmap
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ppd_runtime.models.artifacts import artifact, capabilities

MOST_ROWS = 24
"""Tokens up to which a product is made this way: the library makes larger ones faster."""
SHIM = "AOTITorchError aoti_torch_cpu_few_rows_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)"
"""What compiled code calls, in C."""
_LARGE_PAGE, _LINE = 2**21, 64
_SOURCE = Path(__file__).with_name("few_rows.cpp")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_FOR_THIS_CPU = ("-march=native", "-mcpu=native", "")
"""How compilers are told, in the order in which it is tried."""
_OF_A_CPU = {"model name", "flags", "CPU implementer", "CPU part", "Features"}
_FIRST_WITH_SHIMS = (2, 8)  # the version of PyTorch whose compiled code can call an operator of ours directly


def has_own_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled code makes its products with `few_rows_linear`: in float32, on CPUs, on Linux."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    ours = device.type == "cpu" and dtype == torch.float32
    return ours and sys.platform == "linux" and version >= _FIRST_WITH_SHIMS


def few_rows_linear(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """As `linear` in float32, up to rounding; `weight` may be in bfloat16.

    `multiply` makes the product of `[tokens, inputs]` and `[outputs, inputs]`; None is `product`.
    """
    rows = states.numel() // states.shape[-1]
    if isinstance(rows, int) and rows > MOST_ROWS:
        return linear(states, weight.to(states.dtype), bias)
    flat = states.reshape(rows, states.shape[-1]).contiguous()
    found = (multiply or product)(flat, weight.contiguous())
    found = found.reshape(*states.shape[:-1], weight.shape[0])
    return found if bias is None else found + bias


def product(states: Tensor, weight: Tensor) -> Tensor:
    """`[tokens, outputs]` of states, `[tokens, inputs]` in float32, and a weight, `[outputs, inputs]`; both contiguous.

    Raises:
        TypeError: for dtypes that it is not made for.
    """
    if states.dtype != torch.float32 or weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"states in {states.dtype} and weights in {weight.dtype}: give float32, weights also bfloat16")
    found = states.new_empty(states.shape[0], weight.shape[0])
    places = (weight.data_ptr(), weight.dtype == torch.bfloat16, states.data_ptr(), found.data_ptr())
    kernel().ppd_few_rows_product(*places, weight.shape[1], weight.shape[0], states.shape[0])
    return found


def product_operator() -> Any:
    """`product` as an operator of PyTorch's, for graphs."""
    kernel()
    with _DEFINING:
        if not _LIBRARIES:
            library = torch.library.Library("ppd_runtime", "FRAGMENT")
            library.define("few_rows_linear(Tensor states, Tensor weight) -> Tensor")
            library.impl("few_rows_linear", product, "CPU")
            library.impl("few_rows_linear", _like_product, "Meta")
            _LIBRARIES.append(library)
    return torch.ops.ppd_runtime.few_rows_linear.default


def _like_product(states: Tensor, weight: Tensor) -> Tensor:
    return states.new_empty(states.shape[0], weight.shape[0])


_DEFINING = threading.Lock()
_LIBRARIES: list[torch.library.Library] = []  # what one of them has defined goes with it


@cache
def kernel() -> ctypes.CDLL:
    """The code, loaded so that other compiled code finds it; the first time on a machine it is compiled.

    Raises:
        ValueError: where it cannot be.
    """
    ingredients = {
        "source": hashlib.sha256(_SOURCE.read_bytes()).hexdigest(),
        "flags": _FLAGS,
        "machine": [platform.machine(), cpu_description(), *capabilities(torch.device("cpu"))],
        "versions": [torch.__version__],
    }
    path = artifact(ingredients, _build, ".so")
    try:
        found = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ValueError(f"compile: {path} cannot be loaded ({error}); remove it to have it made anew") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.ppd_few_rows_product.argtypes = [pointer, ctypes.c_int, pointer, pointer, number, number, number]
    found.ppd_few_rows_product.restype = None
    return found


def in_half_the_memory(weight: Tensor) -> Tensor | None:
    """A weight in bfloat16, whose products are the same to the last bit; None where one of its numbers would change."""
    half = weight.to(torch.bfloat16)
    return half if torch.equal(half.to(weight.dtype), weight) else None


class LargePages:
    """Memory in pages of 2 MB, where Linux gives them: reading weights in pages of 4 KB takes up to 1.4 times as long.

    Args:
        most_bytes: that tensors may take; only what they do take is used.
    """

    def __init__(self, most_bytes: int) -> None:
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0
        with contextlib.suppress(OSError):  # no room to reserve, or a kernel without them
            memory = mmap.mmap(-1, most_bytes + 2 * _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory = torch.frombuffer(memory, dtype=torch.uint8)
            self._used = -self._memory.data_ptr() % _LARGE_PAGE
            memory.madvise(mmap.MADV_HUGEPAGE)

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, in this memory; the tensor itself where there is no room."""
        end = self._used + tensor.numel() * tensor.element_size()
        if end > len(self._memory):
            return tensor.contiguous()
        place = self._memory[self._used : end].view(tensor.dtype).view(tensor.shape)
        self._used = -(-end // _LINE) * _LINE
        return place.copy_(tensor)


def product_weights(piece: nn.Module) -> set[str]:
    """The names of a piece's weights that linear layers alone are known to read."""
    return {f"{name}.weight" for name, module in piece.named_modules() if type(module) is nn.Linear}


def cpu_description() -> list[str]:
    """What Linux tells of the first core's make and abilities; empty where it tells nothing."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return []
    return sorted(line for line in first.splitlines() if line.split("\t")[0].strip(" :") in _OF_A_CPU)


def _build(path: Path) -> None:
    root = Path(torch.__file__).parent
    command = [cpp_compiler(), *_FLAGS, f"-I{root / 'include'}", str(_SOURCE), f"-L{root / 'lib'}", "-ltorch_cpu"]
    errors = []
    for cpu in _FOR_THIS_CPU:
        arguments = [*command, *([cpu] if cpu else []), "-o", str(path)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if not done.returncode:
            return
        errors.append(" ".join(done.stderr.split())[:300])
    raise ValueError(f"compile: {_SOURCE.name} cannot be: {errors[0]}")


def cpp_compiler() -> str:
    """The compiler's command; ValueError where there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import, only compiling needs it

    try:
        return get_cpp_compiler()
    except RuntimeError as error:
        raise ValueError("compile: no C++ compiler here; install g++, set CXX, or leave compile out") from error
