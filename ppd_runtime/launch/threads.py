"""Workers as threads of this process, and what every way of launching has in common."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ppd_runtime.launch import orphan_reaper as leftovers
from ppd_runtime.launch.supervisor import Progress, Supervisor, name_of
from ppd_runtime.pipeline.messages import CLIENT, Peers, Shutdown
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.workers.worker import Worker, WorkerSpec

_STOP_DEADLINE_S = 10.0
_KEEPER_S = 0.3  # that it takes where nobody is left to end
_LONGEST_BASE = 24  # a socket's path has 107 bytes, of which Ray's own names take some seventy


@dataclass(frozen=True)
class RequestCounts:
    """What a request came to, for whoever watches a cluster; by rank where it is a worker's."""

    tokens: int
    hits: Mapping[int, int]
    """By the sub-process whose early start was used."""
    misses: int
    stall_s: float
    latency_s: float
    layer_passes: Mapping[int, int]
    restarts: Mapping[int, int]
    """New lives of each worker since the runtime started."""
    serving: Collection[int]
    """Workers that serve."""


class Workers(Protocol):
    """The running workers of one runtime."""

    endpoint: Endpoint
    """The client's place in their network."""

    supervisor: Supervisor
    """Knows who lives, and replaces whoever does not."""

    def record(self, counts: RequestCounts) -> None:
        """Tell whoever watches the workers of a request that has ended."""

    def close(self) -> None:
        """Stop all workers and release everything that was started for them."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def assign_cores(num_workers: int, threads: int, taken: Collection[int] = ()) -> list[tuple[int, ...]]:
    """CPU cores for each worker, `threads` of its own; empty tuples where there are too few for all.

    Those that are `taken` are given where there are too few others.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < num_workers * threads:
        return [()] * num_workers
    cores.sort(key=lambda core: core in taken)
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(num_workers)]


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Keep this thread on some CPU cores while the block lasts; none: where it is."""
    if not (cores and hasattr(os, "sched_setaffinity")):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class SocketFolder:
    """A new folder that only this user may enter, with a path short enough for the sockets in it.

    A small process looks after it: when the folder is removed, or this process ends without warning, it ends workers
    and processes of Ray that still have a file open there, and removes what they left, within some seconds.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix="ppd-", dir=base if len(base) <= _LONGEST_BASE else "/tmp")
        keeper = [sys.executable, "-I", "-S", leftovers.__file__, self.path, str(os.getpid())]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._keeper.stdin and not self._keeper.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.communicate(b"\n", _KEEPER_S)


def import_environment() -> dict[str, str]:
    """Environment variables with which another Python finds this very package."""
    paths = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Introductions:
    """Tells each process that takes part where the others are, and the others where it is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._locations: dict[int, str] = {}

    def introduce(self, rank: int, location: str) -> None:
        """A worker, or one that takes its place, serves at a location from now on."""
        self._endpoint.introduce(rank, location)
        self._locations.pop(rank, None)
        self._endpoint.send(rank, Peers(CLIENT, 0, list(self._locations), list(self._locations.values())))
        for other in self._locations:
            self._endpoint.send(other, Peers(CLIENT, 0, [rank], [location]))
        self._locations[rank] = location


def dismiss(supervisor: Supervisor, endpoint: Endpoint) -> None:
    """Tell everybody who serves to end, and leave their network."""
    for rank in supervisor.serving():
        endpoint.send(rank, Shutdown(CLIENT, 0))
    endpoint.close()


class LocalWorkers:
    """Every worker a thread of this process: no Ray, no sockets; for notebooks and tests."""

    def __init__(self, specs: Sequence[WorkerSpec], most_restarts: int, progress: Progress) -> None:
        self._threads_before = torch.get_num_threads()
        self._network = LocalNetwork([CLIENT, *(spec.rank for spec in specs)])
        self._specs = {spec.rank: spec for spec in specs}
        self._progress: Progress = progress
        self.endpoint: Endpoint = self._network.endpoint(CLIENT)
        self.supervisor = Supervisor(list(self._specs), self._begin_life, most_restarts)
        self.supervisor.start(progress)

    def _begin_life(self, rank: int) -> "ThreadLife":
        self._progress(f"loading {name_of(rank)}")
        return ThreadLife(Worker(self._specs[rank]), self._network.endpoint(rank))

    def record(self, counts: RequestCounts) -> None:
        """Nobody watches threads."""

    def close(self) -> None:
        """Stop the threads and give the process its number of threads back."""
        dismiss(self.supervisor, self.endpoint)
        self.supervisor.stop(_STOP_DEADLINE_S)
        torch.set_num_threads(self._threads_before)


class ThreadLife:
    """A worker in a thread; the worker's own message tells why it ended."""

    location, cancelled = "", False

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        arguments, name = (worker, endpoint), f"ppd-{worker.spec.rank}"
        self._thread = threading.Thread(target=self._serve, args=arguments, name=name, daemon=True)
        self._thread.start()

    @staticmethod
    def _serve(worker: Worker, endpoint: Endpoint) -> None:
        with contextlib.suppress(Exception):  # the worker has told the client in a message
            worker.serve(endpoint)

    def is_ready(self) -> bool:
        """Its layers were loaded before it began."""
        return True

    def end_reason(self) -> str | None:
        """That its thread has ended."""
        return None if self._thread.is_alive() else "its thread has ended"

    def wait(self, seconds: float) -> None:
        """Give it so long to end."""
        self._thread.join(seconds)

    def kill(self) -> None:
        """A thread cannot be ended from outside: it ends with the process, if not before."""
