"""Floors of a decoding step: its matrix products and nothing else, and its weights read once and nothing else."""

import os
import threading
import time

import torch
from torch import nn
from torch.nn.functional import linear

from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.native.products import LargePages


class Products:
    """The products of all linear layers in `module`, each with a one-token vector of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
        self._vectors = [torch.randn(1, 1, weight.shape[1], dtype=weight.dtype) for weight in self.weights]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a pass streams."""
        return sum(weight.nbytes for weight in self.weights)

    def run(self) -> None:
        """One pass; call it in inference mode."""
        for weight, vector in zip(self.weights, self._vectors, strict=True):
            linear(vector, weight)


class Reading:
    """So many bytes, read as fast as it goes here: scalar products of two halves of them.

    Several threads, each on a core of its own, read a share each and do not wait for each other between two readings.
    """

    def __init__(self, num_bytes: int, threads: int = 1) -> None:
        numbers, memory = num_bytes // 4 // (2 * threads), LargePages(num_bytes)
        ones = torch.ones(numbers)
        self._shares = [(memory.copy(ones), memory.copy(ones)) for _ in range(threads)]

    @property
    def num_bytes(self) -> int:
        """That are read, but for a remainder of some bytes."""
        return sum(half.nbytes for share in self._shares for half in share)

    def seconds(self, times: int) -> float:
        """Of one reading, by so many."""
        cores = sorted(os.sched_getaffinity(0))[-len(self._shares) :]
        ready = threading.Barrier(len(self._shares))
        moments: list[float] = []
        readers = [
            threading.Thread(target=self._read, args=(share, [core], times, ready, moments))
            for share, core in zip(self._shares, cores, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return (max(moments) - min(moments)) / times

    @staticmethod
    def _read(
        share: tuple[torch.Tensor, torch.Tensor],
        cores: list[int],
        times: int,
        ready: threading.Barrier,
        moments: list[float],
    ) -> None:
        torch.set_num_threads(1)  # a new thread has as many as there are cores
        with on_cores(cores):
            torch.dot(*share)
            ready.wait()
            moments.append(time.perf_counter())
            for _ in range(times):
                torch.dot(*share)
            moments.append(time.perf_counter())
