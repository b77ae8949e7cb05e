"""What a worker says of the bits that it computes, and what it computes them on."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers

from ppd_runtime.host import processor
from ppd_runtime.models.stage.bit_probe import output_hashes
from ppd_runtime.models.stage.layer_range import LayerRange

_LONGEST, _MOST_HASHES = 1000, 64


@dataclass(frozen=True)
class Bits:
    """Workers whose hashes are equal compute the same bits.

    Raises:
        ValueError: for what is not of this form.
    """

    machine: str
    """Host, device, versions and number format, for people."""
    hashes: Mapping[str, str]
    """SHA-256 of outputs, by name of the run; threads of one process need none."""

    def __post_init__(self) -> None:
        few = isinstance(self.hashes, Mapping) and len(self.hashes) <= _MOST_HASHES
        texts = [self.machine, *self.hashes, *self.hashes.values()] if few else [None]
        if not all(isinstance(text, str) and len(text) <= _LONGEST and text.isprintable() for text in texts):
            raise ValueError(f"these are no worker's hashes: they are texts of up to {_LONGEST} printable characters")

    def different(self, other: "Bits") -> list[str]:
        """Names of runs whose outputs differ."""
        return [name for name in self.hashes if self.hashes[name] != other.hashes.get(name, self.hashes[name])]


NO_BITS = Bits("", {})
"""For workers that are threads of the client's process: all are alike."""


def bits_of(stage: LayerRange, with_head: bool = True) -> Bits:
    """Bits of a stage in this process. This takes several passes through a layer, some milliseconds for a small model.
    `with_head`: whether its head is the whole model's, not some of its rows."""
    machine = f"{socket.gethostname()}: {_device(stage.device)}, torch {torch.__version__}"
    number_format = str(stage.model.dtype).removeprefix("torch.")
    hashes = output_hashes(stage, with_head)
    return Bits(f"{machine}, transformers {transformers.__version__}, {number_format}", hashes)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{processor()} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
