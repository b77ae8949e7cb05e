"""Whether other programs compute on the cores that something is measured on.

A process that computes without waiting, and gets less CPU time than there is, shares its cores.
"""

import contextlib
import hashlib
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ppd_runtime.host import UNDISTURBED
from ppd_runtime.launch.cpu_affinity import on_cores

_PROBE_S = 0.1
_BLOCK = bytes(1 << 18)  # hashed in a fraction of a millisecond, without Python's lock


def busy_note(who: str, share: float) -> str | None:
    """A line for readers of times if `who` had too small a share of the CPU time that it could use; else None."""
    if share > UNDISTURBED:
        return None
    return f"{who} had {share:.0%} of the CPU time that it could use: others were computing as well. Times are rough."


class LoadMeter:
    """How much CPU time a measurement gets of what it could use.

    Args:
        cores: CPU cores of its processes, which probes compute on: computing on one core does not notice a program on
            another one.
    """

    def __init__(self, cores: Sequence[int] = ()) -> None:
        self._cores = tuple(cores)
        self._times: dict[Hashable, tuple[float, float]] = {}

    def add(self, of: Hashable, cpu_s: float, usable_s: float) -> None:
        """Count CPU seconds had and usable, of a core or of some computing."""
        had, usable = self._times.get(of, (0.0, 0.0))
        self._times[of] = had + cpu_s, usable + usable_s

    @contextlib.contextmanager
    def computing(self, threads: int | None) -> Iterator[None]:
        """Count a block in which so many threads of this process compute without waiting; None: nothing is counted."""
        began, cpu_before = time.perf_counter(), time.process_time()
        yield
        if threads:
            self.add("computing", time.process_time() - cpu_before, threads * (time.perf_counter() - began))

    def probe(self) -> None:
        """Compute on all the cores at once for a moment; nothing else of the measurement may be at work."""
        if self._cores:
            with ThreadPoolExecutor(len(self._cores)) as pool:
                for core, times in zip(self._cores, pool.map(_compute_on, self._cores), strict=True):
                    self.add(core, *times)

    @property
    def share(self) -> float:
        """The smallest share, of a core or of the computing; 1 if nothing was counted."""
        return min([1.0, *(had / usable for had, usable in self._times.values() if usable)])


def _compute_on(core: int) -> tuple[float, float]:
    """The CPU time that a thread got on a core, and how long it computed."""
    with on_cores((core,)):
        began, cpu_before = time.perf_counter(), time.thread_time()
        while (wall_s := time.perf_counter() - began) < _PROBE_S:
            hashlib.sha256(_BLOCK).digest()
        return time.thread_time() - cpu_before, wall_s
