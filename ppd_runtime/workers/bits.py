"""Hashes of a worker's outputs, and a description of its machine."""

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
        ValueError: if a value is not of this form.
    """

    machine: str
    """Host, device, versions and number format, for error messages."""
    hashes: Mapping[str, str]
    """SHA-256 of outputs, by name of the run; threads of one process on one device need none."""

    def __post_init__(self) -> None:
        few = isinstance(self.hashes, Mapping) and len(self.hashes) <= _MOST_HASHES
        texts = [self.machine, *self.hashes, *self.hashes.values()] if few else [None]
        if not all(isinstance(text, str) and len(text) <= _LONGEST and text.isprintable() for text in texts):
            raise ValueError(f"these are no worker's hashes: they are texts of up to {_LONGEST} printable characters")

    def different(self, other: "Bits") -> list[str]:
        """Names of runs whose outputs differ."""
        return [name for name in self.hashes if self.hashes[name] != other.hashes.get(name, self.hashes[name])]


NO_BITS = Bits("", {})
"""For workers that are threads of the client's process on one device: all are alike."""


def bits_of(stage: LayerRange, with_head: bool = True) -> Bits:
    """The bits of a stage in this process. They take several passes through a layer: milliseconds for a small model.

    `with_head` says whether the stage's head is the whole model's, and not some rows of it.
    """
    machine = f"{socket.gethostname()}: {_device(stage.device)}, torch {torch.__version__}"
    number_format = str(stage.model.dtype).removeprefix("torch.")
    hashes = output_hashes(stage, with_head)
    return Bits(f"{machine}, transformers {transformers.__version__}, {number_format}", hashes)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{processor()} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
