"""Stages on virtual clocks: the real machines over the real model, with times that are given.

What each stage and head computes is real, so guesses, misses and trees are those of the text; what it takes is not.
With hops and heads of no time, and stages alike, this is the staged layout in lock-step: what its machines could reach
at best.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ppd_runtime.calibration.simulated_cluster import Clock, VirtualNetwork, VirtualProcess
from ppd_runtime.models.checkpoint.description import ModelInfo, load_tokenizer
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.opening import load_stage
from ppd_runtime.models.stage.row_stage import RowStage
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.models.trained.exit_heads import BoundaryHead, SharedHead
from ppd_runtime.pipeline.machine import Machine
from ppd_runtime.pipeline.messages import CLIENT, MAIN, Begin, Message, Token
from ppd_runtime.pipeline.staged.chances import ChanceCalibration
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.machine import RowStageLike
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams
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
    besides: float = 0.0
    """What a stage's process takes for each pass besides layers, heads and hops."""


@dataclass(frozen=True)
class SimulatedText:
    """What one request came to."""

    time: float
    """From the request to its last token, in the unit of the times."""
    time_per_token: float
    """Of a token after the first."""
    first_boundary: tuple[int, ...]
    """As `Stats.first_boundary`."""
    rows_per_token: float
    """Of the first stage."""


class RowCounter(RowStageLike, Protocol):
    """A stage that counts the rows of its passes."""

    rows: int


@dataclass(frozen=True)
class Machines:
    """Everything but the text that the stages' machines need; stages, heads and clocks are in the stages' order.

    The last stage's head is asked for nothing. `hop` is a message's time, `slow_links` are factors on it by rank.
    """

    num_layers: int
    stages: Sequence[RowCounter]
    heads: Sequence[BoundaryHead]
    clocks: Sequence[Clock]
    k: int
    rows: int
    calibration: ChanceCalibration
    repetitions: bool = True
    row_cost: float = 0.0
    """What the first stage knows a further row to add, as a share of the first one's time."""
    hop: float = 0.0
    slow_links: Mapping[int, float] = field(default_factory=dict)

    def run(self, begin: Begin, sampler: Sampler, stop: StopRule) -> SimulatedText:
        """Decode a text of two tokens at least."""
        network, told = VirtualNetwork(self.hop, self.slow_links), list[float]()

        def send(rank: int, addresses: Sequence[int], message: Message) -> None:
            if CLIENT in addresses and isinstance(message, Token):
                told.append(network.processes[rank].clock.now)
            network.send(rank, addresses, message)

        size = len(self.stages)
        first = FirstStage(
            self.stages[0],
            self.heads[0],
            size,
            self.k,
            self.rows,
            partial(send, 1),
            begin,
            self.calibration,
            self.repetitions,
            row_cost=self.row_cost,
        )
        last = LastStage(self.stages[-1], self.num_layers, range(1, size), partial(send, MAIN), begin)
        machines: dict[int, Machine] = {1: first.serve(), MAIN: last.decode(sampler, stop)}
        for rank in range(2, size):
            between = self.stages[rank - 1], self.heads[rank - 1]
            machines[rank] = MiddleStage(*between, rank, size, self.k, partial(send, rank), begin).serve()
        for rank, machine in machines.items():
            network.processes[rank] = VirtualProcess(self.clocks[(rank - 1) % size], machine)
        network.run()
        per_token = (told[-1] - told[0]) / (len(told) - 1)
        return SimulatedText(told[-1], per_token, tuple(first.first_boundary), self.stages[0].rows / len(told))


class SimulatedStages:
    """A model in stages; it decodes one text after the other, and learns how often heads are right as it goes.

    Args:
        info: the model.
        cuts: the stages' borders.
        k: candidates at each boundary.
        rows: of a pass, at the most.
        compiled: run compiled passes, whose tokens are those of compiled ordinary decoding.
        repetitions: as in `RuntimeConfig`.
        head: names the candidates of every boundary; None: the model's own.

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
        head: BoundaryHead | None = None,
    ) -> None:
        self._has_repetitions, self._head = repetitions, head
        self._info, self._k, self._rows = info, k, rows
        self._tokenizer, self._calibration = load_tokenizer(info), ChanceCalibration()
        code = compile_ahead(info, torch.float32, "cpu") if compiled else {}
        borders = pairwise([0, *cuts, info.num_layers])
        self._stages = [
            load_stage(info, last, torch.float32, "cpu", code, first=first_layer) for first_layer, last in borders
        ]

    def decode(self, prompt_ids: list[int], params: SamplingParams, times: StageTimes) -> SimulatedText:
        """Decode a text of two tokens at least."""
        sampler = Sampler(params, len(prompt_ids), self._info.eos_token_ids)
        clocks = [Clock(times.layer, 1.0, 0.0, random.Random()) for _ in self._stages]
        pairs = list(zip(self._stages, clocks, strict=True))
        machines = Machines(
            self._info.num_layers,
            stages=[_ClockedStage(stage, clock, times) for stage, clock in pairs],
            heads=[ClockedHead(self._head or SharedHead(stage, sampler), clock, times) for stage, clock in pairs],
            clocks=clocks,
            k=self._k,
            rows=self._rows,
            calibration=self._calibration,
            repetitions=self._has_repetitions,
            row_cost=times.row_cost,
            hop=times.hop,
        )
        stop = StopRule(params, self._info.eos_token_ids, self._tokenizer, prompt_ids)
        return machines.run(Begin(CLIENT, 1, prompt_ids, params, live=True), sampler, stop)


class _ClockedStage:
    """A stage whose passes take a clock's time; see `RowStageLike`."""

    def __init__(self, stage: Stage, clock: Clock, times: StageTimes) -> None:
        self._stage, self._clock, self._times = RowStage(stage, MOST_HELD), clock, times
        self.num_layers, self.rows = self._stage.num_layers, 0
        self.cached_tokens, self.layers_at_once = 0, 1

    @property
    def layer_passes(self) -> int:
        return self._stage.layer_passes

    def begin(self, capacity: int, prompt: Sequence[int] = ()) -> None:
        self._stage.begin(capacity)

    def prompt_chunks(self, tokens: int) -> list[range]:
        return self._stage.prompt_chunks(tokens)

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        self._clock.spend_layers(self.num_layers)
        return self._stage.run_prompt(inputs, position)

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]], layers: range) -> Tensor:
        if not layers.start:
            self.rows += len(paths)
            self._clock.spend(self._times.besides)
        self._clock.spend_layers(len(layers), 1 + self._times.row_cost * (len(paths) - 1))
        return self._stage.run_rows(inputs, paths, layers)

    def keep(self, node: int) -> None:
        self._stage.keep(node)

    def drop(self, node: int) -> None:
        self._stage.drop(node)

    def logits(self, hidden: Tensor) -> Tensor:
        self._clock.spend(self._times.head)
        return self._stage.logits(hidden)


class ClockedHead:
    """A boundary's head, whose guesses take a clock's time."""

    def __init__(self, head: BoundaryHead, clock: Clock, times: StageTimes) -> None:
        self._head, self._clock, self._time = head, clock, times.exit_head

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """The head's own."""
        self._clock.spend(self._time)
        return self._head.guesses(hidden, texts, k)
