"""The program's side of the fork server: worker processes, started in a moment and watched like its children."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ppd_runtime.launch.child_python import child_command, child_environment
from ppd_runtime.workers import entry
from ppd_runtime.workers.fork_server import LONGEST_MESSAGE, NAME

_ASKS_NOBODY_FOR_GPUS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Else a library that asks PyTorch for GPUs at import would start CUDA, which forks could not use."""
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
"""Variables that Ray sets in a program that uses it. Plain workers use no Ray."""
_LOOK_EVERY_S = 0.02
_PATIENCE_S = 0.5
"""Wait for an ended worker's exit code: its server may be stopped, or gone."""
UNKNOWN_EXIT_CODE = 256
"""For a worker whose fork server told no exit code."""


def can_fork() -> bool:
    """Whether this is a Linux that gives pidfds, which gVisor and old container runtimes refuse.

    On other systems libraries may not survive a fork. A worker that is not forked imports for itself.
    """
    try:
        descriptor = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        signal.pidfd_send_signal(descriptor, 0)  # only asks
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def can_read(descriptor: int, seconds: float) -> bool:
    """Whether data or the end of file comes within `seconds`."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


class ForkServer:
    """A process that has imported what workers need, and forks them; `open_fork_server` gives one."""

    def __init__(self) -> None:
        self.holders = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (`close` closes it)
        with theirs:
            self.process = subprocess.Popen(
                child_command(entry.__name__, NAME),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=child_environment() | _ASKS_NOBODY_FOR_GPUS,
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._asked: deque[ForkedProcess] = deque()
        self._living: dict[int, ForkedProcess] = {}

    def fork(self, name: str, streams: Sequence[int]) -> "ForkedProcess":
        """Ask for a worker with these standard streams, without waiting for it; if the server is gone, it has
        failed."""
        process = ForkedProcess(self)
        with self._lock, contextlib.suppress(ConnectionError):
            self._asked.append(process)
            socket.send_fds(self._control, [name.encode()], list(streams))
        return process

    def hear(self) -> None:
        """Take in what the server has said, and its end."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while (heard := self._receive())[0]:
                self._note(json.loads(heard[0]), heard[1])
            self._note_end()

    def said(self) -> str:
        """What it wrote to stderr, until it is closed."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Release it; the last holder ends it. Its forks are told by their own streams."""
        with _opening:
            self.holders -= 1
            if self.holders:
                return
            for inherited in [inherited for inherited, server in _open.items() if server is self]:
                del _open[inherited]
        self.process.kill()
        self.process.wait()
        for process in self._living.values():
            process.adopted_exit_code()
        self._control.close()
        self._errors.close()

    def _receive(self) -> tuple[bytes, Sequence[int]]:
        """What the server says next; empty if it has ended. Raises BlockingIOError if it is silent."""
        try:
            return socket.recv_fds(self._control, LONGEST_MESSAGE, 1)[:2]
        except ConnectionError:  # raised once, before its last words
            return self._receive()

    def _note(self, answer: dict[str, int], descriptors: Sequence[int]) -> None:
        if descriptors:
            process = self._asked.popleft()
            process.appear(answer["pid"], *descriptors)
            self._living[answer["pid"]] = process
        else:
            self._living.pop(answer["pid"]).returncode = answer["exit_code"]

    def _note_end(self) -> None:
        while self._asked:
            process = self._asked.popleft()
            process.returncode = self.process.wait()


_open: dict[object, ForkServer] = {}
_opening = threading.Lock()


def open_fork_server() -> ForkServer:
    """The one that serves this program's runtimes, or a new one; each holder closes it.

    Forks inherit what the server inherited, so it serves while this program would hand down the same.
    """
    with _opening:
        server = _open.get(inherited := _inherited())
        if server is None or server.process.poll() is not None:
            server = _open[inherited] = ForkServer()
        server.holders += 1
        return server


def _inherited() -> object:
    folder, priority = Path().stat(), os.getpriority(os.PRIO_PROCESS, 0)
    process = os.getpid(), folder.st_dev, folder.st_ino, priority, os.sched_getscheduler(0)
    read = {name: value for name, value in child_environment().items() if not name.startswith(_OF_RAY)}
    return *process, frozenset(os.sched_getaffinity(0)), frozenset(read.items())


class ForkedProcess:
    """A present or future fork of the fork server, with the used part of `subprocess.Popen`."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._descriptor: int | None = None
        self.pid = server.process.pid
        """Until it exists, the server's: what stops that one stops both."""
        self.returncode: int | None = None

    def appear(self, pid: int, descriptor: int) -> None:
        """It exists, with a descriptor that stays its own."""
        self.pid, self._descriptor = pid, descriptor
        if self.returncode is not None:  # it is no longer wanted
            self.kill()

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs or is to come."""
        if self.returncode is None:
            self._server.hear()
        if self.returncode is None and self._descriptor is not None and can_read(self._descriptor, 0):
            self.returncode = self._last_heard()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout or 0)
            if self._descriptor is None:
                time.sleep(_LOOK_EVERY_S)
            else:
                can_read(self._descriptor, _LOOK_EVERY_S)
        return code

    def kill(self) -> None:
        """End it now, or as soon as it exists."""
        if self._descriptor is None:
            self.returncode = -signal.SIGKILL
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def server_said(self) -> str:
        """Its server's stderr, for a worker that never existed."""
        return self._server.said()

    def adopted_exit_code(self) -> int | None:
        """Reap it if it has ended, its server is gone and this program inherits orphans.

        Process 1 of a container does, and a child subreaper. Nobody else would reap it.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # somebody else's, or a Linux before 5.4
                if ended := os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG):
                    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return None

    def _last_heard(self) -> int:
        """The ended process' exit code: from its server, or by reaping it if that is gone."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.returncode is None and self._server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S / 10)
            self._server.hear()
        code = self.adopted_exit_code() if self.returncode is None else self.returncode
        return UNKNOWN_EXIT_CODE if code is None else code

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
