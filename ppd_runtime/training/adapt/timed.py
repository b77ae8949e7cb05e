"""A training that takes the time that it is given, and goes on where a stopped one ended."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder, in_words, read_seconds, write_json
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.loop import Training

_WARMUP = 20
_LEAST_STEPS = 10
_CLOSED_FORMS = 0.25
"""The share of a training's time in which its closed forms end."""
T = TypeVar("T")


def bfloat16_products(device: torch.device) -> torch.autocast:
    """Makes products of bfloat16 numbers where the device has instructions for them, which is several times as fast."""
    on_cpu = device.type == "cpu"
    has = torch.ops.mkldnn._is_mkldnn_bf16_supported() if on_cpu else torch.cuda.is_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=bool(has))


class TimedTraining(Training):
    """AdamW with a cosine to 0 over the time or the steps, whichever is over first; a few steps in any case.

    Args:
        name: of its files in the folder, and in what is told.
        network: what learns; parameters that need no gradient stay as they are.
        num_steps: steps at the most.
        folder: keeps an unfinished training.
        rate: the greatest learning rate.
    """

    _clock: Clock
    _share: float
    _began: float

    def __init__(
        self,
        name: str,
        network: nn.Module,
        num_steps: int,
        folder: WorkFolder,
        rate: float = 1e-3,
    ) -> None:
        self._rate = rate
        super().__init__(network, num_steps)
        self._name = name
        self._checkpoint = Checkpoint(folder / f"{name}.safetensors", network, [self.optimizer])
        self._began_file = folder / f"{name}-began.json"

    def run(self, clock: Clock, share: float, progress: Progress) -> None:
        """Train until `share` of the time is over, or all steps are taken."""
        if not self._began_file.exists():
            write_json(self._began_file, clock.spent)
        self._clock, self._share, self._began = clock, share, read_seconds(self._began_file)

        def tell(step: int, loss: float) -> None:
            progress(f"{self._name}: step {step}, loss {loss:.3f}, at most {in_words(clock.left(share))}")

        self.take_steps(self._checkpoint, tell)
        self.end()

    def end(self) -> None:
        """After the last step of all, and again if a later run finds them taken."""

    def in_time(self, parts: Iterable[T], share: float = 1.0) -> Iterator[T]:
        """Parts of what a closed form reads, until `share` of the time for closed forms is over; the first always.

        The time counts from the first run's begin: a later run does not get it again.
        """
        end = self._began + share * _CLOSED_FORMS * (self._share * self._clock.seconds - self._began)
        for part in parts:
            yield part
            if self._clock.spent >= end:
                return

    def goes_on(self) -> bool:
        """Whether there are steps left, and time or too few steps taken."""
        return super().goes_on() and (self.steps < _LEAST_STEPS or bool(self._clock.left(self._share)))

    def learning_rate(self) -> float:
        """The next step's, by the share of the steps or of the time that is over."""
        end = self._share * self._clock.seconds
        passed = (self._clock.spent - self._began) / (end - self._began) if end > self._began else 1.0
        passed = max(self.steps / self.num_steps, min(passed, 0.99))
        return self._rate * min(1.0, (self.steps + 1) / _WARMUP) * (0.5 + 0.5 * math.cos(math.pi * passed))
