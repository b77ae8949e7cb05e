"""PyTorch's compiler at work in a folder of its own, and apart from the current one."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOT_FROM_HERE = "import sys\nsys.path[:] = filter(None, sys.path)\n"


@contextlib.contextmanager
def compiler_apart() -> Iterator[None]:
    """Have it write into a folder that goes away, and start no Python that imports from the current folder.

    In the user's own folder a file has the same name whoever makes it: a package would have in it what another process
    was just writing again. Which instructions the CPU has is found out there before, to be found there the next time.
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
