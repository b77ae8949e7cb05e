"""Workers as plain processes of this host, without Ray; messages between them travel over sockets of ours."""

import contextlib
import json
import logging
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ppd_runtime.launching import START_DEADLINE_S, Progress, import_environment, socket_folder
from ppd_runtime.pipeline.messages import CLIENT, MAIN, Shutdown
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.sockets import open_endpoint
from ppd_runtime.worker import WorkerSpec
from ppd_runtime.worker_process import start_order

logger = logging.getLogger(__name__)
_STOP_DEADLINE_S = 5.0


class ProcessWorkers:
    """Every worker a process, `python -m ppd_runtime.start_worker`, in a session of its own.

    A worker ends with its owner, however that ends: it holds the other end of the worker's standard input.
    """

    def __init__(self, specs: Sequence[WorkerSpec], transport: str, progress: Progress) -> None:
        self._specs = {spec.rank: spec for spec in specs}
        self._folder = socket_folder()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._serving: set[int] = set()
        self._closed = False
        try:
            self.endpoint: Endpoint = open_endpoint(transport, self._folder, CLIENT)
            for spec in specs:
                self._processes[spec.rank] = self._start(spec)
                _give(self._processes[spec.rank], start_order(spec, transport, self._folder))
            self._wait_until_ready(progress)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: WorkerSpec) -> "subprocess.Popen[str]":
        name = "main" if spec.rank == MAIN else f"sub-{spec.rank}"
        with self._errors_of(spec.rank).open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "ppd_runtime.start_worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=import_environment(),
                start_new_session=True,  # Ctrl-C is for the owner, who stops its workers
            )

    def _wait_until_ready(self, progress: Progress) -> None:
        waiting = set(self._processes)
        deadline = time.monotonic() + START_DEADLINE_S
        with selectors.DefaultSelector() as selector:
            for rank, process in self._processes.items():
                selector.register(process.stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
            while waiting:
                names = ", ".join(self._specs[rank].name for rank in sorted(waiting))
                progress(f"waiting for {names}")
                answered = selector.select(deadline - time.monotonic())
                if not answered:
                    raise TimeoutError(f"{names} did not start within {START_DEADLINE_S:.0f} s")
                for key, _ in answered:
                    selector.unregister(key.fileobj)
                    self._read_answer(key.data)
                    waiting.discard(key.data)

    def _read_answer(self, rank: int) -> None:
        process = self._processes[rank]
        line = process.stdout.readline() if process.stdout else ""
        answer = json.loads(line) if line else {"error": self._last_words(rank)}
        if "error" in answer:
            raise RuntimeError(f"{self._specs[rank].name} failed to start: {answer['error']}")
        self._serving.add(rank)

    def check(self) -> None:
        """Raise RuntimeError if the main process is gone; log a lost sub-process, which costs time only."""
        for rank in [rank for rank in self._serving if self._processes[rank].poll() is not None]:
            self._serving.discard(rank)
            if rank == MAIN:
                raise RuntimeError(f"the main process failed: {self._last_words(rank)}")
            logger.warning("sub-process %d is lost, decoding goes on without it: %s", rank, self._last_words(rank))

    def close(self) -> None:
        """Stop the processes and remove the folder of sockets."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "endpoint"):
            for rank in self._serving:
                self.endpoint.send(rank, Shutdown(CLIENT, 0))
            self.endpoint.close()
        deadline = time.monotonic() + _STOP_DEADLINE_S
        for rank, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()) if rank in self._serving else 0)
            process.kill()
        for process in self._processes.values():
            process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output has ended, so it is ending
            self._processes[rank].wait(_STOP_DEADLINE_S)
        code = self._processes[rank].returncode
        if code is not None and code < 0:
            return f"signal {-code} ended it"
        lines = [line for line in self._errors_of(rank).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with exit code {code}"

    def _errors_of(self, rank: int) -> Path:
        return Path(self._folder, f"errors-{rank}")


def _give(process: "subprocess.Popen[str]", line: str) -> None:
    """Write a line to a process' standard input, which stays open."""
    if process.stdin:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer will say so
            process.stdin.write(line + "\n")
            process.stdin.flush()
