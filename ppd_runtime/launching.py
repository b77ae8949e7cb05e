"""Workers as threads of this process, and what every way of launching has in common."""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ppd_runtime.pipeline.messages import CLIENT, MAIN, Shutdown
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.worker import Worker, WorkerSpec

Progress = Callable[[str], None]
"""Is told in a line what a start-up waits for."""

START_DEADLINE_S = 300.0
_STOP_DEADLINE_S = 10.0
_CONNECT_DEADLINE_S = 5.0
_LONGEST_BASE = 24  # a socket's path has 107 bytes, of which Ray's own names take some seventy


class Workers(Protocol):
    """The running workers of one runtime."""

    endpoint: Endpoint
    """The client's place in their network."""

    def check(self) -> None:
        """Raise RuntimeError with the worker's own message if the main process is gone; log a lost sub-process."""

    def close(self) -> None:
        """Stop all workers and release everything that was started for them."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def assign_cores(num_workers: int, threads: int) -> list[tuple[int, ...]]:
    """CPU cores for each worker, `threads` of its own; empty tuples where there are too few for all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < num_workers * threads:
        return [()] * num_workers
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(num_workers)]


def socket_folder() -> str:
    """A new folder that only this user may enter, with a path short enough for the sockets in it."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ppd-", dir=base if len(base) <= _LONGEST_BASE else "/tmp")


def import_environment() -> dict[str, str]:
    """Environment variables with which another Python finds this very package."""
    paths = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def check_ray_address(address: str) -> None:
    """Raise ValueError where nobody answers at a Ray address of the form host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"ray_address={address!r}: give host:port, as `ray start --head` prints it")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_DEADLINE_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray_address={address!r}: nobody answers there ({error}); is the cluster running?") from error


class LocalWorkers:
    """Every worker a thread of this process: no Ray, no sockets; for notebooks and tests."""

    def __init__(self, specs: Sequence[WorkerSpec], progress: Progress) -> None:
        self._threads_before = torch.get_num_threads()
        network = LocalNetwork([CLIENT, *(spec.rank for spec in specs)])
        self.endpoint: Endpoint = network.endpoint(CLIENT)
        self._ranks = [spec.rank for spec in specs]
        self._threads: list[threading.Thread] = []
        for spec in specs:
            progress(f"loading {spec.name}")
            worker = Worker(spec)
            arguments = (worker, network.endpoint(spec.rank))
            thread = threading.Thread(target=self._serve, args=arguments, name=f"ppd-{spec.rank}", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _serve(worker: Worker, endpoint: Endpoint) -> None:
        with contextlib.suppress(Exception):  # the worker has told the client in a message
            worker.serve(endpoint)

    def check(self) -> None:
        """Raise RuntimeError if the main process' thread has ended."""
        if not self._threads[MAIN].is_alive():
            raise RuntimeError("the main process has ended")

    def close(self) -> None:
        """Stop the threads and give the process its number of threads back."""
        for rank in self._ranks:
            self.endpoint.send(rank, Shutdown(CLIENT, 0))
        deadline = time.monotonic() + _STOP_DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        torch.set_num_threads(self._threads_before)
