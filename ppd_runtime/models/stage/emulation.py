"""Emulates a stage on a slower device of its own, for more devices than this machine has.

It computes its real result, then sleeps until a given time per layer has passed. What is measured then is protocol and
scheduling, with real messages and real candidates; figures from it are an emulation's and have to say so.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.settings.checks import check_number

_SPIN_S = 0.00005  # a sleeper wakes late: busy-wait the rest, which leaves others nearly all of the core
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class EmulatedDevice:
    """Least times of a pass, in milliseconds. Several tokens take no longer than one."""

    layer_ms: float
    head_ms: float = 0.0
    row_cost: float = 0.0
    """What a further row of a stage's pass adds, as a share of the first one's time."""

    draft_ms: float = 0.0
    """A draft model's pass over all its layers."""

    def __post_init__(self) -> None:
        check_number("layer_ms", self.layer_ms)
        check_number("head_ms", self.head_ms)
        check_number("row_cost", self.row_cost)
        check_number("draft_ms", self.draft_ms)

    def of_draft_model(self, num_layers: int) -> "EmulatedDevice":
        """The device of a draft model of `num_layers` layers."""
        return EmulatedDevice(self.draft_ms / num_layers)

    def pace(self, run: Callable[[], Tensor], num_layers: int, of_rows: bool) -> Tensor:
        """Compute as `LayerRange.pace`, then sleep until the device would have done it."""
        began = time.perf_counter()
        result = run()
        rows = 1 + self.row_cost * (result.shape[1] - 1) if of_rows else 1.0
        _wait_until(began + (num_layers * self.layer_ms * rows if num_layers else self.head_ms) / 1000)
        return result


def emulation_note(device: EmulatedDevice | None) -> str:
    """The note that belongs beside times taken on such a device; empty if there was none."""
    return "" if device is None else f"EMULATED devices of {device.layer_ms:g} ms a layer"


def emulated(stage: LayerRange, device: EmulatedDevice | None) -> LayerRange:
    """The stage, whose passes and heads take at least as long as on the device from now on; None leaves it as it is."""
    if device is not None:
        stage.pace, stage.rows_share_passes = device.pace, True
        _wake_in_time()
    return stage


def _wait_until(moment: float) -> None:
    """Sleep until shortly before the moment, then watch the clock."""
    left = moment - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < moment:
        pass


def _wake_in_time() -> None:
    """Ask Linux not to delay this thread's wake-ups, which it may by 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
