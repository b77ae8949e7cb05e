"""Programs that compute on a core, for tests of what notices them."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores

_PROGRAMS = 2
_SOURCE = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])]); print(flush=True)\nwhile True: pass"


def cores() -> list[int]:
    """The CPU cores that tests may use."""
    return [core for some in assign_cores(available_cores(), 1) for core in some]


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Two programs at work on a core until the block ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(_PROGRAMS):
            command = [sys.executable, "-c", _SOURCE, str(core)]
            program = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(program.kill)
            assert program.stdout and program.stdout.readline(), "it ended before it was at work"
        yield
