"""A training that takes the time that it is given, and goes on where a stopped one ended."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder, in_words, write_json
from ppd_runtime.training.checkpoint import Checkpoint

_WARMUP = 20
_LEAST_STEPS = 10
_SAVE_EVERY_S = 20.0


def few_bits_products(device: torch.device) -> torch.autocast:
    """Makes products of bfloat16 numbers where the device has instructions for them, which is several times as fast."""
    on_cpu = device.type == "cpu"
    has = torch.ops.mkldnn._is_mkldnn_bf16_supported() if on_cpu else torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=bool(has))


class TimedTraining(ABC):
    """AdamW with a cosine to 0 over the time or the steps, whichever is over first; a few steps in any case.

    Args:
        name: of its files in the folder, and in what is told.
        network: what learns; parameters that need no gradient stay as they are.
        num_steps: steps at the most.
        folder: keeps an unfinished training.
        settings: JSON values that decide the result.
        rate: the greatest learning rate.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        num_steps: int,
        folder: WorkFolder,
        settings: Mapping[str, Any],
        rate: float = 1e-3,
    ) -> None:
        self._rate = rate
        self.network, self.num_steps, self._name = network, num_steps, name
        self._optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.0)
        self._checkpoint = Checkpoint(folder / f"{name}.safetensors", network, [self._optimizer], settings)
        self._began_file = folder / f"{name}-began.json"
        self.steps = 0
        """Steps taken."""

    def begin(self) -> None:  # noqa: B027
        """Before the first step of all: set what can be computed without steps."""

    @abstractmethod
    def add_gradients(self, step: int) -> float:
        """Add the gradients of a step's mean loss to the parameters'; gives the loss."""

    def run(self, clock: Clock, share: float, progress: Progress) -> None:
        """Train until `share` of the time is over, or all steps are taken."""
        self.steps, saved, end = self._checkpoint.load(), time.monotonic(), share * clock.seconds
        if not self._began_file.exists():
            write_json(self._began_file, clock.spent)
        began = float(self._began_file.read_text())
        if not self.steps:
            self.begin()
        while self.steps < self.num_steps and (self.steps < _LEAST_STEPS or clock.left(share)):
            passed = (clock.spent - began) / (end - began) if end > began else 1.0
            self._set_rate(max(self.steps / self.num_steps, min(passed, 0.99)))
            self._optimizer.zero_grad()
            loss = self.add_gradients(self.steps)
            self._optimizer.step()
            self.steps += 1
            if time.monotonic() - saved >= _SAVE_EVERY_S:
                self._checkpoint.save(self.steps)
                saved = time.monotonic()
            progress(f"{self._name}: step {self.steps}, loss {loss:.3f}, at most {in_words(clock.left(share))}")
        self._checkpoint.save(self.steps)

    def _set_rate(self, passed: float) -> None:
        """`passed` is the share of the training that is over."""
        warmup = min(1.0, (self.steps + 1) / _WARMUP)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * warmup * (0.5 + 0.5 * math.cos(math.pi * passed))
