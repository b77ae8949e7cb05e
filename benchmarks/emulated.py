"""Devices and links that are not here: real-time priority, cores that stay awake, and messages that come later."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

_SPIN = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, [int(sys.argv[1])])
while os.getppid() == int(sys.argv[2]):
    for _ in range(100_000):
        pass
"""
_START_S = 0.3
_MOST_BYTES = 2**20


@contextlib.contextmanager
def woken_at_once() -> Iterator[bool]:
    """Give this thread and whatever it starts real-time scheduling; yield whether it was granted.

    An emulated device sleeps most of the time. One that wakes should not queue behind programs that only compute.
    """
    try:
        before, priority = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, priority)


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Run a process of idle priority on each core: a core that sleeps takes 60 to 250 µs to wake on virtual machines.

    Emulated devices sleep where real ones compute, and the hosts of real ones would not sleep.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else []
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            spinning.append(subprocess.Popen([sys.executable, "-S", "-c", _SPIN, str(core), str(os.getpid())]))
        time.sleep(_START_S)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Yield a folder in which the block's temporary folders lie, and with them the sockets of its workers."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="ppd", dir="/tmp") as folder:  # a socket's path has to be short
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def slow_links(folder: Path, delay_s: float) -> None:
    """Delay messages to the workers below a folder by so many seconds, on each connection that is opened from now on.

    A relay takes the place of each worker's socket until the program ends. Messages to the client are not delayed.

    Raises:
        ValueError: where no worker listens.
    """
    paths = [path for path in folder.glob("*/worker-*") if path.is_socket()]
    if not paths:
        raise ValueError("no sockets of workers: a delay is for plain processes on one host")
    for path in paths:
        real = path.rename(path.with_name(f"real-{path.name}"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=_accept, args=(listener, real, delay_s), daemon=True).start()


def _accept(listener: socket.socket, real: Path, delay_s: float) -> None:
    while True:
        came, _ = listener.accept()
        pieces: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        threading.Thread(target=_take, args=(came, pieces, delay_s), daemon=True).start()
        threading.Thread(target=_hand_on, args=(pieces, real), daemon=True).start()


def _take(came: socket.socket, pieces: "SimpleQueue[tuple[float, bytes]]", delay_s: float) -> None:
    with came, contextlib.suppress(OSError):
        while piece := came.recv(_MOST_BYTES):
            pieces.put((time.perf_counter() + delay_s, piece))
    pieces.put((0.0, b""))


def _hand_on(pieces: "SimpleQueue[tuple[float, bytes]]", real: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as onward, contextlib.suppress(OSError):  # it may be gone
        onward.connect(str(real))
        while True:
            due, piece = pieces.get()
            if not piece:
                return
            time.sleep(max(0.0, due - time.perf_counter()))
            onward.sendall(piece)
