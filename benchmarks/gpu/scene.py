"""Where stages of the benchmark run: the device, its models, and how long a call takes there."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import random_model, shape_config
from ppd_runtime.models.stage.layer_range import LayerRange

Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Scene:
    """What stages are told."""

    pretend: bool
    out: Path
    """The folder with what earlier stages have found."""

    @property
    def device(self) -> torch.device:
        """The GPU, or a CPU that stands for it."""
        return torch.device("cpu" if self.pretend else "cuda:0")

    def choose(self, real: Any, pretended: Any) -> Any:
        """How much of something."""
        return pretended if self.pretend else real

    def stage(self, shape: str, dtype: torch.dtype, *kinds: int) -> LayerRange:
        """The whole of such a model, with compiled code for these kinds of passes."""
        model = random_model(shape_config("little" if self.pretend else shape), dtype, self.device)
        if not kinds:
            return LayerRange(model)
        from ppd_runtime.models.compiled.export import compile_layers
        from ppd_runtime.models.compiled.passes import CompiledLayers

        files = {kind: compile_layers(model.config, dtype, self.device, kind) for kind in kinds}
        return LayerRange(model, CompiledLayers(model, files))

    def wait(self) -> None:
        """Until the device has done all that this thread has asked for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def milliseconds(self, call: Callable[[], object], rounds: int, warm_up: int = 2) -> list[float]:
        """Each round's time, waited for at both ends."""
        found = []
        for number in range(-warm_up, rounds):
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            if number >= 0:
                found.append(1000 * (time.perf_counter() - began))
        return found

    def median_ms(self, call: Callable[[], object], rounds: int) -> float:
        """The middle of `milliseconds`."""
        return statistics.median(self.milliseconds(call, rounds))


def name_of(dtype: torch.dtype) -> str:
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")
