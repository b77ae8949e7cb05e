"""Where stages of the benchmark run: the device, its models, and how long a call takes there."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import random_config, random_model
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.rows_range import RowsRange

Row = dict[str, Any]
Rows = Iterator[Row]
_WARM_UP = 2  # rounds


@dataclass(frozen=True)
class Scene:
    """Where a stage runs."""

    pretend: bool
    """Whether a CPU and little models stand for the GPU and its models."""

    @property
    def device(self) -> torch.device:
        """The GPU, or a CPU that stands for it."""
        return torch.device("cpu" if self.pretend else "cuda:0")

    def choose(self, real: Any, pretended: Any) -> Any:
        """How much of something."""
        return pretended if self.pretend else real

    def stage(self, shape: str, dtype: torch.dtype, *kinds: int, padded: bool = False) -> LayerRange:
        """The whole of such a model, with compiled code for these kinds of passes; or its passes are `padded`."""
        model = random_model(random_config(self.choose(shape, "little")), dtype, self.device)
        if not kinds:
            return RowsRange(model) if padded else LayerRange(model)
        from ppd_runtime.models.compiled.export import compile_layers
        from ppd_runtime.models.compiled.passes import CompiledLayers

        files = {kind: compile_layers(model.config, dtype, self.device, kind) for kind in kinds}
        return LayerRange(model, CompiledLayers(model, files))

    def wait(self) -> None:
        """Until the device has done all that this thread has asked for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def median_ms(self, call: Callable[[], object], rounds: int) -> float:
        """A call's time, the median of so many rounds behind two others."""
        return statistics.median([self.ms(call) for _ in range(_WARM_UP + rounds)][_WARM_UP:])

    def ms(self, call: Callable[[], object]) -> float:
        """A call's time, waited for at both ends."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return 1000 * (time.perf_counter() - began)
