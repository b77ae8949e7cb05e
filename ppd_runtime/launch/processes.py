"""Workers as plain processes of this host, without Ray; messages between them travel over sockets of ours."""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ppd_runtime.launch.base import Introductions, RequestCounts, dismiss
from ppd_runtime.launch.child_python import child_command, child_environment
from ppd_runtime.launch.fork_server import (
    UNKNOWN_EXIT_CODE,
    ForkedProcess,
    ForkServer,
    can_fork,
    can_read,
    open_fork_server,
)
from ppd_runtime.launch.socket_folder import SocketFolder
from ppd_runtime.launch.supervisor import ANSWER_DEADLINE_S, LAST_LOOK_S, PING_EVERY_S, Progress, Supervisor
from ppd_runtime.settings.layouts import CLIENT, DECIDER, Layout
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.sockets import make_networks, open_endpoint
from ppd_runtime.workers import entry
from ppd_runtime.workers.bits import NO_BITS
from ppd_runtime.workers.process import WARNING, WELCOME, read_answer, start_order
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
_STOP_DEADLINE_S = 5.0

Process = subprocess.Popen[bytes] | ForkedProcess
Start = Callable[[str, Sequence[int]], Process]
"""Starts a process by name, with its three standard streams."""


class ProcessWorkers:
    """Each worker is a process in its own session, forked from one that has imported what they all need.

    A worker ends with its owner, however that ends: the owner holds the other end of its standard input.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        transport: str,
        most_restarts: int,
        progress: Progress,
        bind_interface: str | None = None,
    ) -> None:
        self._specs = {spec.rank: spec for spec in specs}
        self._folder = SocketFolder()
        self._closed = False
        self._servers: list[ForkServer] = []  # the last one serves
        self._networks = make_networks(transport, self._folder.path, bind_interface, [CLIENT, *self._specs])
        self.supervisor = Supervisor(specs[DECIDER].layout, self._spawn, most_restarts, self._introduce)
        try:
            self.endpoint: Endpoint = open_endpoint(self._networks[CLIENT], CLIENT)
            self._introductions = Introductions(self.endpoint)
            self.supervisor.start(progress)
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> "ProcessHandle":
        network = replace(self._networks[rank], client=self.endpoint.location)
        spec, folder = self._specs[rank], Path(self._folder.path)
        return ProcessHandle(spec.layout, rank, start_order(spec, network), folder, self._start)

    def _start(self, name: str, streams: Sequence[int]) -> Process:
        if not can_fork():
            return start_alone(name, streams)
        if not self._servers or self._servers[-1].process.poll() is not None:
            self._servers.append(open_fork_server())
        return self._servers[-1].fork(name, streams)

    def _introduce(self, rank: int, location: str) -> None:
        self._introductions.introduce(rank, location)

    def record(self, counts: RequestCounts) -> None:
        """Plain processes are not watched."""

    def close(self) -> None:
        """Stop the processes and remove the folder of sockets."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:  # an interrupt skips none of the later steps
            last.callback(self._folder.remove)
            for server in self._servers:
                last.callback(server.close)
            last.callback(self.supervisor.stop, _STOP_DEADLINE_S)
            if hasattr(self, "endpoint"):
                dismiss(self.supervisor, self.endpoint)


class ProcessHandle:
    """A worker process: it reads its order from standard input and answers on standard output, where it also warns."""

    cancelled = False

    def __init__(self, layout: Layout, rank: int, order: str, folder: Path, start: Start) -> None:
        self.location, self.bits = "", NO_BITS
        name, self._called = layout.short_name(rank), layout.named(rank)
        self._answers = b""
        self._pinged_at: float | None = None
        self._answered_at = time.monotonic()
        path = folder / f"errors-{name}"
        orders, to_it = os.pipe()
        from_it, answers = os.pipe()
        self._orders, self._stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb", buffering=0)
        with os.fdopen(orders), os.fdopen(answers, "w"), path.open("w") as errors:
            self._errors = path.open(errors="replace")  # readable even once removed
            self.process = start(name, (orders, answers, errors.fileno()))
        os.set_blocking(from_it, False)
        self._tell(order.encode() + b"\n")

    def is_ready(self) -> bool:
        """Whether it says that it is ready; raises RuntimeError with its words if it failed.

        It cannot answer before it has read its order, so a process that is stopped counts as failed, too.
        """
        is_open = self._read()
        if not (lines := self._take_lines()):
            if not is_open:
                raise RuntimeError(self._last_words())
            self._check_running()
            return False
        self._answered_at = time.monotonic()
        self.location, self.bits = read_answer(lines[0])
        return True

    def _check_running(self) -> None:
        now = time.monotonic()
        self.process.poll()  # the fork server may have said which process it is
        if not _is_stopped(self.process.pid):
            self._answered_at = now
        elif now - self._answered_at > ANSWER_DEADLINE_S:
            raise RuntimeError(f"it has been stopped for {ANSWER_DEADLINE_S:.0f} s")

    def welcome(self) -> None:
        """Have it serve."""
        self._tell(WELCOME)

    def end_reason(self) -> str | None:
        """Its last words, or that it has not answered for long: it may be stopped, or its host out of reach."""
        if self.process.poll() is not None:
            return self._last_words()
        self._read()
        now = time.monotonic()
        if self._take_lines():
            self._answered_at, self._pinged_at = now, None
        if self._pinged_at is None:
            if now - self._answered_at >= PING_EVERY_S:
                self._pinged_at = now
                self._tell(b"\n")
        elif now - self._pinged_at > ANSWER_DEADLINE_S and not can_read(self._stdout.fileno(), LAST_LOOK_S):
            return f"it has not answered for {ANSWER_DEADLINE_S:.0f} s"
        return None

    def wait(self, seconds: float) -> None:
        """Wait until it ends, or `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def kill(self) -> None:
        """End it and reap it."""
        self.process.kill()
        self.process.wait()
        self._read()
        self._take_lines()
        for stream in (self._orders, self._stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _tell(self, line: bytes) -> None:
        """Write to its standard input, which stays open; if it has ended, its answer will say so."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.write(line)
            self._orders.flush()

    def _read(self) -> bool:
        """Take what it has written; False once nothing more will come."""
        while piece := self._stdout.read(65536):
            self._answers += piece
        return piece is None  # nothing for now; the end is empty bytes

    def _take_lines(self) -> list[bytes]:
        """The whole lines of what it has written, but its warnings, which are logged."""
        *lines, self._answers = self._answers.split(b"\n")
        for line in lines:
            if line.startswith(WARNING):
                logger.warning("%s: %s", self._called, line.removeprefix(WARNING).decode(errors="replace"))
        return [line for line in lines if not line.startswith(WARNING)]

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output has ended, so it is ending
            self.process.wait(_STOP_DEADLINE_S)
        code = self.process.returncode
        if code is not None and code < 0:
            return f"signal {-code} ended it"
        said = self._errors.read()
        if not said and isinstance(self.process, ForkedProcess):
            said = self.process.server_said()
        lines = [line for line in said.splitlines() if line.strip()]
        if not lines and code == UNKNOWN_EXIT_CODE:
            return "it ended"
        return lines[-1] if lines else f"it ended with exit code {code}"


def start_alone(name: str, streams: Sequence[int]) -> "subprocess.Popen[bytes]":
    """A worker process that imports for itself."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        child_command(entry.__name__, name),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C is for the owner, who stops its workers
    )


def _is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process, if the system has a /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
