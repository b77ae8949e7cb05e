"""The CPU cores of workers: who has which, and which of them runtimes of one program share."""

import contextlib
import os
import threading
import weakref
from collections.abc import Collection, Iterator

from ppd_runtime.host import available_cores


def own_cores() -> list[int]:
    """Cores that this thread may run on, no more than its CPU quota pays for."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(available_cores())
    return list(allowed[: available_cores()])


def assign_cores(
    num_workers: int, threads: int, taken: Collection[int] = (), device: str = "cpu"
) -> list[tuple[int, ...]]:
    """CPU cores for each worker, `threads` of its own; empty tuples if there are too few for all.

    Cores that are `taken` are given last. Workers on GPUs get none: the threads of CUDA, NCCL and ZeroMQ would share
    them with one that polls for messages.
    """
    if device.startswith("cuda"):
        return [()] * num_workers
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if min(len(cores), available_cores()) < num_workers * threads:
        return [()] * num_workers
    cores.sort(key=lambda core: core in taken)
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(num_workers)]


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Keep this thread on some CPU cores during the block; none: leave it."""
    if not (cores and hasattr(os, "sched_setaffinity")):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class CoreShare:
    """One runtime's share of this host's CPU cores, until it is released or dropped.

    Args:
        num_workers: processes; each has `threads` cores to itself if there are enough. The cores of this program's
            other runtimes are given last.
        threads: CPU threads of a worker.
        pinned: whether the workers stay on cores at all.
    """

    def __init__(self, num_workers: int, threads: int, pinned: bool) -> None:
        self._num_workers, self._threads, self._running = num_workers, threads, False
        self.cores: list[tuple[int, ...]] = [()] * num_workers
        """Each worker's own; empty: wherever the system likes."""
        with _LOCK:
            taken = {core for other in _SHARES for cores in other.cores for core in cores}
            if pinned:
                self.cores = assign_cores(num_workers, threads, taken)
            _SHARES.add(self)

    def crowding(self) -> str | None:
        """A message if there are fewer cores than these workers and those that run already use."""
        with _LOCK:
            others = [other for other in _SHARES if other._running and other is not self]
        used = sum(share._num_workers * share._threads for share in (self, *others))
        if available_cores() >= used:
            return None
        workers = f"{self._num_workers} workers" + (f" with {self._threads} threads each" if self._threads > 1 else "")
        beside = f", beside {sum(other._num_workers for other in others)} of other runtimes," if others else ""
        return f"{workers}{beside} share {available_cores()} CPU cores: expect less speed than a core for each gives"

    def begin(self) -> None:
        """The workers run."""
        self._running = True

    def release(self) -> None:
        """Give the cores back; may be called twice."""
        with _LOCK:
            _SHARES.discard(self)


_LOCK = threading.Lock()


_SHARES: "weakref.WeakSet[CoreShare]" = weakref.WeakSet()
