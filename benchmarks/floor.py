"""The memory floor of a decoding step: its weights read once, and nothing else."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.native.products import LargePages


class Reading:
    """So many bytes, read as fast as this machine can: scalar products of two halves of them.

    Several threads, each on a core of its own, read a share each and do not wait for each other between two readings.
    """

    def __init__(self, num_bytes: int, threads: int = 1) -> None:
        memory, ones = LargePages(num_bytes), torch.ones(num_bytes // 4 // (2 * threads))
        self._shares = [(memory.copy(ones), memory.copy(ones)) for _ in range(threads)]

    @property
    def num_bytes(self) -> int:
        """The bytes that are read, a remainder of some bytes left out."""
        return sum(half.nbytes for share in self._shares for half in share)

    def seconds(self, times: int) -> float:
        """Read so many times; the seconds of one reading."""
        threads = len(self._shares)
        cores, ready = sorted(os.sched_getaffinity(0))[-threads:], Barrier(threads)

        def read(share: tuple[torch.Tensor, torch.Tensor], core: int) -> tuple[float, float]:
            torch.set_num_threads(1)  # a new thread has as many as there are cores
            with on_cores([core]):
                torch.dot(*share)
                ready.wait()
                began = time.perf_counter()
                for _ in range(times):
                    torch.dot(*share)
                return began, time.perf_counter()

        with ThreadPoolExecutor(threads) as pool:
            began, ended = zip(*pool.map(read, self._shares, cores), strict=True)
        return (max(ended) - min(began)) / times
