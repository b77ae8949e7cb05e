"""Keeps cores from falling asleep: a core that idles takes 60 to 250 µs to wake up on virtual machines."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == int(sys.argv[2]):
    for _ in range(100_000):
        pass
"""
_START_S = 0.3


@contextlib.contextmanager
def keep_cores_awake() -> Iterator[bool]:
    """On each core a process that runs when nothing else does; whether this system has such.

    For emulated devices, which sleep where real ones compute: their hosts would not.
    """
    if not hasattr(os, "SCHED_IDLE"):
        yield False
        return
    cores = sorted(os.sched_getaffinity(0))
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            spinning.append(subprocess.Popen([sys.executable, "-S", "-c", _SPIN, str(core), str(os.getpid())]))
        time.sleep(_START_S)
        yield all(process.poll() is None for process in spinning)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
