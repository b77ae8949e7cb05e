"""Layers, caches and states for passes that are recorded on the GPUs of `two_gpus`."""

from types import SimpleNamespace

import torch
from torch import Tensor
from two_gpus import TwoGpus, on_gpu

from ppd_runtime.models.compiled.aoti_passes import Part
from ppd_runtime.models.stage.caches import PreallocatedLayer

SIZE = 8


def states(index: int, seed: int = 0) -> Tensor:
    return on_gpu(torch.randn(1, 1, SIZE, generator=torch.Generator().manual_seed(seed)), index)


def attention(gpus: TwoGpus, forgets_to_write: bool) -> Part:
    """A layer's code that writes its rows and adds up those up to its position; perhaps the writing is not recorded."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        hidden, position, keys, values = inputs
        output = torch.empty(hidden.shape, device=hidden.device)

        def write() -> None:
            keys[int(position)], values[int(position)] = hidden[0], hidden[0] + 1

        def attend() -> None:
            output.copy_(keys[: int(position) + 1].sum((0, 1)) * values[int(position)].sum() + hidden)

        if not (forgets_to_write and gpus.current_stream(hidden.device).capturing):
            gpus.launch(hidden.device, write)
        gpus.launch(hidden.device, attend)
        return [output]

    return Part(SimpleNamespace(run=run, reads_mask=True), [])


def caches_in(memory: Tensor, length: int) -> list[PreallocatedLayer]:
    """A request's, in memory `[layers, 2, rows, heads, dim]` with entries of so many tokens."""
    caches = [PreallocatedLayer(memory.shape[2], None) for _ in memory]
    for cache, rows in zip(caches, memory, strict=True):
        cache.rows, cache.length = (rows[0], rows[1]), length
    return caches
