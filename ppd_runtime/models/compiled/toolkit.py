"""What compiling for a GPU needs on the machine that compiles."""

import importlib.util
from pathlib import Path

_HEADER = Path("include", "cuda.h")
_WAY_OUT = "or leave compile out"


def check_toolkit() -> None:
    """Raise ValueError, in one line, if PyTorch's compiler would fail for lack of Triton or CUDA's headers."""
    from torch.utils.cpp_extension import CUDA_HOME  # takes a second to import, only compiling needs it

    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"compile: code for GPUs needs Triton, which is not installed: install PyTorch for CUDA, {_WAY_OUT}"
        )
    if CUDA_HOME is None or not Path(CUDA_HOME, _HEADER).is_file():
        raise ValueError(
            f"compile: code for GPUs needs a CUDA toolkit, and there is no {_HEADER} in CUDA_HOME={CUDA_HOME}: install "
            f"one and have CUDA_HOME name it, {_WAY_OUT}"
        )
