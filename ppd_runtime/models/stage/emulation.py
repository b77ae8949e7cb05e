"""Emulates a stage on a slower device of its own, for more devices than this machine has.

It computes its real result, then sleeps until a given time per layer has passed. What is measured then is protocol and
scheduling, with real messages and real candidates; figures from it are an emulation's and have to say so.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.checks import check_number
from ppd_runtime.models.stage.compiled_passes import CompiledPasses
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSubset
from ppd_runtime.models.stage.trees import Part, PlacedTree, TokenTree

_SPIN_S = 0.00005  # a sleeper wakes late: busy-wait the rest, which leaves others nearly all of the core
_PR_SET_TIMERSLACK = 29
_MOST_PRIORITY = 40


@dataclass(frozen=True)
class EmulatedDevice:
    """Least times of a pass, in milliseconds. Several tokens take no longer than one."""

    layer_ms: float
    head_ms: float = 0.0
    row_cost: float = 0.0
    """What a further row of a stage's pass adds, as a share of the first one's time."""

    def __post_init__(self) -> None:
        check_number("layer_ms", self.layer_ms)
        check_number("head_ms", self.head_ms)
        check_number("row_cost", self.row_cost)


def emulation_note(device: EmulatedDevice | None) -> str:
    """The note that belongs beside times taken on such a device; empty if there was none."""
    return "" if device is None else f"EMULATED devices of {device.layer_ms:g} ms a layer"


class EmulatedStage(LayerRange):
    """A stage whose passes take at least as long as on the emulated device."""

    def __init__(
        self,
        model: PreTrainedModel,
        compiled: CompiledPasses | None,
        device: EmulatedDevice,
        first_layer: int = 0,
        longest_in_chunks: int | None = None,
    ) -> None:
        super().__init__(model, compiled, first_layer, longest_in_chunks)
        self.layers_at_once = -(-self.num_layers // 3)
        self._layer_s, self._head_s = device.layer_ms / 1000, device.head_ms / 1000
        self._row_cost = device.row_cost
        _wake_in_time()

    def chain_drafting(self, layers: int | LayerSubset, behind: LayerRange | None = None) -> None:
        """Always None: a chain in one call would take this machine's time, not the device's."""

    def _run(
        self,
        first: int,
        last: int,
        inputs: list[int] | Tensor,
        position: int,
        in_prompt: bool = False,
        tree: TokenTree | Sequence[PlacedTree] | None = None,
    ) -> Tensor:
        began = time.perf_counter()
        hidden = super()._run(first, last, inputs, position, in_prompt, tree)
        _wait_until(began + (last - first) * self._layer_s)
        return hidden

    def _run_rows(self, parts: Iterable[Part], first: int, last: int) -> Tensor:
        began = time.perf_counter()
        hidden = super()._run_rows(parts, first, last)
        passes = 1 + self._row_cost * (hidden.shape[1] - 1)
        _wait_until(began + (last - first) * self._layer_s * passes)
        return hidden

    def _run_tree(self, token_ids: list[int], parents: Sequence[int], position: int) -> Tensor:
        began = time.perf_counter()
        hidden = super()._run_tree(token_ids, parents, position)
        _wait_until(began + self.num_layers * self._layer_s)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = super()._logits(hidden)
        _wait_until(began + self._head_s)
        return logits


def come_first(rank: int) -> None:
    """Run this worker's process before those of higher ranks, if all have been given real-time priorities.

    On devices of their own none would wait for another. If they share cores, the worker whose work is least likely to
    be used should wait. Not for threads of one process: they wait for each other's locks.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_RR:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(max(1, _MOST_PRIORITY - rank)))


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
