"""Whether other programs compute on the cores that something is measured on.

A process that computes without waiting, and gets less CPU time than there is, shares its cores.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

UNDISTURBED = 0.9
"""The least share of its usable CPU time that a process gets if no other program computes."""
_PROBE_S = 0.1
_BLOCK = bytes(1 << 18)  # hashed in a fraction of a millisecond, without Python's lock


def busy_note(who: str, share: float) -> str | None:
    """A line for readers of times if `who` had too small a share of the CPU time that it could use; else None."""
    if share > UNDISTURBED:
        return None
    return f"{who} had {share:.0%} of the CPU time that it could use: others were computing as well. Times are rough."


@dataclass
class CpuTime:
    """CPU time received while computing, in seconds."""

    threads: int = 1
    """Threads that computed."""
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, cpu_s: float, wall_s: float) -> None:
        """Add a period."""
        self.cpu_s += cpu_s
        self.wall_s += wall_s

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a block in which this process computes without waiting."""
        began, cpu_before = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.add(time.process_time() - cpu_before, time.perf_counter() - began)

    @property
    def share(self) -> float:
        """The CPU time over the possible CPU time, at most 1; 1 if nothing was counted."""
        return min(1.0, self.cpu_s / (self.wall_s * self.threads)) if self.wall_s else 1.0


class LoadMeter:
    """How much of some cores a measurement gets, by its own computing and by probes of all of them.

    A probe sees what computing on one core does not: a program on the next one, which other processes of the
    measurement will meet.

    Args:
        cores: CPU cores that the measurement's processes use.
        threads: threads of the computing that `computing` counts.
    """

    def __init__(self, cores: Sequence[int], threads: int = 1) -> None:
        self.computing = CpuTime(threads)
        self._probed = {core: CpuTime() for core in cores}

    def probe(self) -> None:
        """Compute on all the cores at once for a moment; nothing else of the measurement may be at work."""
        if self._probed:
            with ThreadPoolExecutor(len(self._probed)) as pool:
                for core, (cpu_s, wall_s) in zip(self._probed, pool.map(_compute_on, self._probed), strict=True):
                    self._probed[core].add(cpu_s, wall_s)

    @property
    def share(self) -> float:
        """The smallest share, of the own computing or of a core; 1 if nothing was counted."""
        return min(self.computing.share, *(time.share for time in self._probed.values()), 1.0)


def _compute_on(core: int) -> tuple[float, float]:
    """The CPU time that a thread got on a core, and how long it computed."""
    from ppd_runtime.launch.cpu_affinity import on_cores

    with on_cores((core,)):
        began, cpu_before = time.perf_counter(), time.thread_time()
        while (wall_s := time.perf_counter() - began) < _PROBE_S:
            hashlib.sha256(_BLOCK).digest()
        return time.thread_time() - cpu_before, wall_s
