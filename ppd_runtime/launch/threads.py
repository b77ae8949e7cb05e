"""Workers as threads of this process."""

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from ppd_runtime.launch.base import Introductions, RequestCounts, dismiss
from ppd_runtime.launch.supervisor import Progress, Supervisor
from ppd_runtime.pipeline.messages import Shutdown
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.workers.bits import NO_BITS, Bits
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker

_STOP_DEADLINE_S = 10.0


class LocalWorkers:
    """Workers as threads of this process: no Ray, no sockets; for notebooks and tests."""

    def __init__(self, specs: Sequence[WorkerSpec], most_restarts: int, progress: Progress) -> None:
        self._threads_before = torch.get_num_threads()
        self._network = LocalNetwork([CLIENT, *(spec.rank for spec in specs)])
        self._specs = {spec.rank: spec for spec in specs}
        self._spawned: list[int] = []  # the rank of each start
        self._are_alike = len({spec.device for spec in specs}) == 1
        self._progress: Progress = progress
        self.endpoint: Endpoint = self._network.endpoint(CLIENT)
        introduce = Introductions(self.endpoint).introduce
        self.supervisor = Supervisor(specs[DECIDER].layout, self._spawn, most_restarts, introduce)
        try:
            self.supervisor.start(progress)
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> "ThreadHandle":
        self._progress(f"loading {self.supervisor.name_of(rank)}")
        self._spawned.append(rank)
        # OpenMP's helpers end with the thread that loads: with more of them than cores all sleep between two products
        with ThreadPoolExecutor(1) as loading:
            worker = loading.submit(Worker, self._specs[rank]).result()
        bits = NO_BITS if self._are_alike else worker.bits()
        return ThreadHandle(worker, self._network.endpoint(rank), bits)

    def record(self, counts: RequestCounts) -> None:
        """Threads are not watched."""

    def close(self) -> None:
        """Stop the threads and give the process its number of threads back."""
        for rank in self._spawned:  # one that was not welcomed yet hears it too, and one that was given up
            self.endpoint.send(rank, Shutdown(CLIENT, 0))
        dismiss(self.supervisor, self.endpoint)
        self.supervisor.stop(_STOP_DEADLINE_S)
        torch.set_num_threads(self._threads_before)


class ThreadHandle:
    """A worker in a thread; the worker's own message tells why it ended."""

    location, cancelled = "", False

    def __init__(self, worker: Worker, endpoint: Endpoint, bits: Bits) -> None:
        self.bits = bits
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

    def welcome(self) -> None:
        """It serves from its beginning: the first request comes after all workers' bits have been compared."""

    def end_reason(self) -> str | None:
        """Says that the worker's thread has ended."""
        return None if self._thread.is_alive() else "its thread has ended"

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds`."""
        self._thread.join(seconds)

    def kill(self) -> None:
        """A thread cannot be ended from outside: it ends with the process, if not before."""
