"""Stages on virtual clocks: the real machines over the real model, with times that are given.

What each stage and head computes is real, so guesses, misses and trees are those of the text; what it takes is not.
With hops and heads of no time, and stages alike, this is the staged layout in lock-step: what its machines could reach
at best.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ppd_runtime.calibration.simulated_cluster import Clock, VirtualNetwork, VirtualProcess
from ppd_runtime.config import SamplingParams
from ppd_runtime.models.checkpoint.description import ModelInfo, load_tokenizer
from ppd_runtime.models.opening import compile_ahead, load_stage
from ppd_runtime.models.stage.row_stage import RowStage
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.models.trained.exit_heads import SharedHead
from ppd_runtime.pipeline.machine import Machine
from ppd_runtime.pipeline.messages import CLIENT, MAIN, Begin, Message, Token
from ppd_runtime.pipeline.staged.chances import Calibration
from ppd_runtime.pipeline.staged.first_stage import MOST_NODES, FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.sampling import Sampler
from ppd_runtime.text import StopRule


@dataclass(frozen=True)
class StageTimes:
    """What things take, all in one unit of time."""

    layer: float = 1.0
    head: float = 0.0
    """The last stage's final head."""
    exit_head: float = 0.0
    """A boundary's, over all rows of a pass."""
    hop: float = 0.0
    row_cost: float = 0.0
    """What a further row of a pass adds, as a share of the first one's time."""


@dataclass(frozen=True)
class SimulatedText:
    """What one request came to."""

    time_per_token: float
    """Of a token after the first, in the unit of the times."""
    first_boundary: tuple[int, ...]
    """As `Stats.first_boundary`."""
    rows_per_token: float
    """Of the first stage."""


class SimulatedStages:
    """A model in stages; it decodes one text after the other, and learns how often heads are right as it goes.

    Args:
        info: the model.
        cuts: the stages' borders.
        k: candidates at each boundary.
        rows: of a pass, at the most.
        compiled: run compiled passes, whose tokens are those of compiled ordinary decoding.
        repetitions: as in `RuntimeConfig`.

    Raises:
        ValueError: where the model cannot be compiled, or not on this machine.
    """

    def __init__(
        self,
        info: ModelInfo,
        cuts: Sequence[int],
        k: int,
        rows: int,
        compiled: bool = True,
        repetitions: bool = True,
    ) -> None:
        self._has_repetitions = repetitions
        self._info, self._k, self._rows = info, k, rows
        self._tokenizer, self._calibration = load_tokenizer(info), Calibration()
        code = compile_ahead(info, torch.float32, "cpu") if compiled else {}
        borders = pairwise([0, *cuts, info.num_layers])
        self._stages = [
            load_stage(info, last, torch.float32, "cpu", code, first=first_layer) for first_layer, last in borders
        ]

    def decode(self, prompt_ids: list[int], params: SamplingParams, times: StageTimes) -> SimulatedText:
        """Decode a text of two tokens at least."""
        network, sampler = VirtualNetwork(times.hop, {}), Sampler(params, len(prompt_ids))
        begin, told = Begin(CLIENT, 1, prompt_ids, params, live=True), list[float]()

        def send(rank: int, addresses: Sequence[int], message: Message) -> None:
            if CLIENT in addresses and isinstance(message, Token):
                told.append(network.processes[rank].clock.now)
            network.send(rank, addresses, message)

        clocks = [Clock(times.layer, 1.0, 0.0, random.Random()) for _ in self._stages]
        stages = [_ClockedStage(stage, clock, times) for stage, clock in zip(self._stages, clocks, strict=True)]
        heads = [_ClockedHead(stage, sampler, clock, times) for stage, clock in zip(self._stages, clocks, strict=True)]
        size = len(stages)
        first = FirstStage(
            stages[0],
            heads[0],
            size,
            self._k,
            self._rows,
            partial(send, 1),
            begin,
            self._calibration,
            self._has_repetitions,
        )
        last = LastStage(stages[-1], self._info.num_layers, range(1, size), partial(send, MAIN), begin)
        stop = StopRule(params, self._info.eos_token_ids, self._tokenizer, prompt_ids)
        machines: dict[int, Machine] = {1: first.serve(), MAIN: last.decode(sampler, stop)}
        for rank in range(2, size):
            middle = MiddleStage(stages[rank - 1], heads[rank - 1], rank, size, self._k, partial(send, rank), begin)
            machines[rank] = middle.serve()
        for rank, machine in machines.items():
            network.processes[rank] = VirtualProcess(clocks[(rank - 1) % size], machine)
        network.run()
        per_token = (told[-1] - told[0]) / (len(told) - 1)
        return SimulatedText(per_token, tuple(first.first_boundary), stages[0].rows / len(told))


class _ClockedStage:
    """A stage whose passes take a clock's time; see `RowStageLike`."""

    def __init__(self, stage: Stage, clock: Clock, times: StageTimes) -> None:
        self._stage, self._clock, self._times = RowStage(stage, 2 * MOST_NODES), clock, times
        self.num_layers, self.rows = self._stage.num_layers, 0

    @property
    def layer_passes(self) -> int:
        return self._stage.layer_passes

    def begin(self, capacity: int) -> None:
        self._stage.begin(capacity)

    def prompt_chunks(self, tokens: int) -> list[range]:
        return self._stage.prompt_chunks(tokens)

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        self._clock.spend_layers(self.num_layers)
        return self._stage.run_prompt(inputs, position)

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        self.rows += len(paths)
        self._clock.spend_layers(self.num_layers, 1 + self._times.row_cost * (len(paths) - 1))
        return self._stage.run_rows(inputs, paths)

    def keep(self, node: int) -> None:
        self._stage.keep(node)

    def drop(self, node: int) -> None:
        self._stage.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        self._clock.spend(self._times.head)
        return self._stage.logits(hidden)


class _ClockedHead:
    """A boundary's head, whose guesses take a clock's time."""

    def __init__(self, stage: Stage, sampler: Sampler, clock: Clock, times: StageTimes) -> None:
        self._head, self._clock, self._time = SharedHead(stage, sampler), clock, times.exit_head

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        self._clock.spend(self._time)
        return self._head.guesses(hidden, texts, k)
