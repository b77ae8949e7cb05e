"""Runs PyTorch's compiler in a folder of its own, apart from the current folder."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOT_FROM_HERE = "import sys\nsys.path[:] = filter(None, sys.path)\n"


@contextlib.contextmanager
def compiler_apart() -> Iterator[None]:
    """Make the compiler use a temporary folder and start no Python that imports from the current one.

    In the user's own folder file names are shared: a package could contain what another process is rewriting. The CPU's
    instructions are detected in the user's folder first, so that the next run finds them there.
    """
    from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa  # takes seconds to import, only compiling needs it

    if sys.version_info < (3, 11) and not VecISA._avx_py_load.startswith(_NOT_FROM_HERE):
        VecISA._avx_py_load = _NOT_FROM_HERE + VecISA._avx_py_load  # what it runs by `python -c`
    with _variables(PYTHONSAFEPATH="1"), tempfile.TemporaryDirectory(prefix="ppd-compile-") as folder:  # Python 3.11's
        pick_vec_isa()
        with _variables(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=str(Path(folder, "triton"))):
            yield


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
