"""The memory floor of a decoding step: its weights read once, and nothing else."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.native.products import LargePages


def reading_s(num_bytes: int, threads: int, times: int) -> float:
    """Seconds to read so many bytes as fast as this machine can, as scalar products of two halves of them.

    Several threads, each on a core of its own, read a share each, so many times, and do not wait for each other between
    two readings.
    """
    memory, ones = LargePages(num_bytes), torch.ones(num_bytes // 4 // (2 * threads))
    shares = [(memory.copy(ones), memory.copy(ones)) for _ in range(threads)]
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
        began, ended = zip(*pool.map(read, shares, cores), strict=True)
    return (max(ended) - min(began)) / times
