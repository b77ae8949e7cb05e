"""Keeps cores from falling asleep: a core that idles takes 60 to 250 µs to wake up on virtual machines."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [int(sys.argv[1])])
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def awake_cores() -> Iterator[bool]:
    """On each core a process that runs when nothing else does; whether this system has such.

    For emulated devices, which sleep where real ones compute: their hosts would not.
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield False
        return
    cores = sorted(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN, str(core)]) for core in cores]
    try:
        yield True
    finally:
        for process in spinning:
            process.kill()
            process.wait()
