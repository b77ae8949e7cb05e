"""The staged layout's machines on virtual clocks, over a text whose tokens are first named at random boundaries.

There is no model: the text is the numbers 0, 1, 2, …, as in `virtual_clock`. What a head names besides the right
token nobody else names. Heads know how often they are right, not where: a model's know better, and need fewer rows.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from virtual_clock import Clock, VirtualNetwork, VirtualProcess, VirtualSampler

from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.messages import Begin, Message, Token
from ppd_runtime.pipeline.ports import Machine
from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.checks import stage_layers
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

_NEXT_RANK = 0.25
"""How likely a rank is to hold the right token, to the rank before it; the demo model's heads have about that."""


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


class RowCounter(Protocol):
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
    calibration: GuessRecord
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
        last = LastStage(self.stages[-1], self.num_layers, range(1, size), partial(send, DECIDER), begin)
        machines: dict[int, Machine] = {1: first.serve(), DECIDER: last.decode(sampler, stop)}
        for rank in range(2, size):
            between = self.stages[rank - 1], self.heads[rank - 1]
            machines[rank] = MiddleStage(*between, rank, size, self.k, partial(send, rank), begin).serve()
        for rank, machine in machines.items():
            network.processes[rank] = VirtualProcess(self.clocks[(rank - 1) % size], machine)
        network.run()
        per_token = (told[-1] - told[0]) / (len(told) - 1)
        return SimulatedText(told[-1], per_token, tuple(first.first_boundary), self.stages[0].rows / len(told))


class ClockedHead:
    """A boundary's head, whose guesses take a clock's time."""

    def __init__(self, head: BoundaryHead, clock: Clock, times: StageTimes) -> None:
        self._head, self._clock, self._time = head, clock, times.exit_head

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """The head's own."""
        self._clock.spend(self._time)
        return self._head.guesses(hidden, texts, k)


@dataclass(frozen=True)
class StagedSetting:
    """What is simulated; times in any one unit."""

    num_layers: int
    cuts: tuple[int, ...]
    k: int
    rows: int
    num_new_tokens: int
    times: StageTimes = field(default_factory=StageTimes)
    jitter: float = 0.0
    """Standard deviation of the random factor, with mean 1, of each layer's pass."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on all work of a stage, by its number; 0 is the last stage."""
    slow_links: Mapping[int, float] = field(default_factory=dict)
    """Factor on the hop of messages from or to a stage."""
    ranks: tuple[float, ...] = ()
    """How often the right token has each rank at the boundary that first names it, in any unit; empty: not known."""

    @property
    def stages(self) -> int:
        """Processes in a row."""
        return len(self.cuts) + 1


def simulate_staged_runs(
    setting: StagedSetting, shares: Sequence[float], runs: int, seed: int = 0
) -> list[SimulatedText]:
    """Simulate generations whose first boundaries are drawn, each with its share."""
    generator, calibration = random.Random(seed), GuessRecord()
    return [_simulate(setting, shares, generator, calibration) for _ in range(runs)]


def _simulate(
    setting: StagedSetting, shares: Sequence[float], generator: random.Random, calibration: GuessRecord
) -> SimulatedText:
    ranks = setting.ranks or [_NEXT_RANK**rank for rank in range(setting.k)]
    size, tokens = setting.stages, setting.num_new_tokens
    text = Text(
        first_boundary=generator.choices(range(1, size + 1), shares, k=tokens),
        ranks=generator.choices(range(setting.k), ranks, k=tokens),
    )
    clocks = [_clock(setting, (number + 1) % size, generator) for number in range(size)]
    layers = stage_layers(setting.num_layers, setting.cuts)
    said = [[share * rank / sum(ranks) for rank in ranks] for share in (*accumulate(shares[:-1]), 0.0)]
    machines = Machines(
        setting.num_layers,
        stages=[VirtualRowStage(count, clock, setting.times) for count, clock in zip(layers, clocks, strict=True)],
        heads=[
            ClockedHead(VirtualBoundaryHead(text, boundary, own), clock, setting.times)
            for boundary, (own, clock) in enumerate(zip(said, clocks, strict=True), start=1)
        ],
        clocks=clocks,
        k=setting.k,
        rows=setting.rows,
        calibration=calibration,
        row_cost=setting.times.row_cost,
        hop=setting.times.hop,
        slow_links=setting.slow_links,
    )
    params = SamplingParams(max_new_tokens=setting.num_new_tokens, ignore_eos=True)
    begin = Begin(CLIENT, 1, [0], params, live=True)
    return machines.run(begin, VirtualSampler(params), StopRule(params, frozenset(), None))


def _clock(setting: StagedSetting, rank: int, generator: random.Random) -> Clock:
    own = random.Random(generator.getrandbits(32))
    return Clock(setting.times.layer, setting.slow.get(rank, 1.0), setting.jitter, own)


@dataclass(frozen=True)
class Text:
    """For the tokens at positions 1, 2, …: the first boundary that names each, and its rank there, from 0."""

    first_boundary: Sequence[int]
    ranks: Sequence[int]


class VirtualBoundaryHead:
    """Names the right token from its first boundary on, and what is never right besides.

    Args:
        boundary: the number of its own.
        said: how likely it says its candidates are, by rank.
    """

    def __init__(self, text: Text, boundary: int, said: Sequence[float]) -> None:
        self._text, self._boundary, self._said = text, boundary, said

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """k candidates behind each text, one of them right where all of the text is, and this boundary knows."""
        return [list(zip(self._named(text, k), self._said, strict=True)) for text in texts]

    def _named(self, text: Sequence[int], k: int) -> list[int]:
        position, num_right = len(text), len(self._text.ranks)
        named = [num_right + self._boundary * k + rank for rank in range(1, k + 1)]
        if text[-1] == position - 1 and self._text.first_boundary[position - 1] <= self._boundary:
            named[self._text.ranks[position - 1]] = position
        return named


class VirtualRowStage:
    """A `TreeRange` that computes nothing: it spends time, and knows which nodes have run."""

    def __init__(self, num_layers: int, clock: Clock, times: StageTimes) -> None:
        self.num_layers, self.rows, self.layer_passes = num_layers, 0, 0
        self._clock, self._times = clock, times
        self._has_run: set[int] = set()
        self.cached_tokens, self.layers_at_once = 0, 1
        self.only_chains = self.joins_heads = False

    def begin(self, capacity: int, prompt: Sequence[int] = ()) -> None:
        """Forget the last sequence."""
        self._has_run.clear()

    def prompt_chunks(self, tokens: int) -> list[range]:
        """A prompt runs whole."""
        return [range(tokens)]

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Spend the time of a pass; a prompt's takes as long as one over one token."""
        self._clock.spend_layers(self.num_layers)
        return torch.empty(1, len(inputs) if isinstance(inputs, list) else inputs.shape[1], 0)

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]], layers: range) -> Tensor:
        """Spend the time of a pass of so many rows."""
        for path in paths:
            if not self._has_run.issuperset(path[:-1]):
                raise RuntimeError(f"node {path[-1]} runs before one that it stands behind")
            self._has_run.add(path[-1])
        if not layers.start:
            self.rows += len(paths)
            self._clock.spend(self._times.besides)
        self.layer_passes += len(layers) * len(paths)
        self._clock.spend_layers(len(layers), 1 + self._times.row_cost * (len(paths) - 1))
        return torch.empty(1, len(paths), 0)

    def keep(self, node: int) -> None:
        """A node is certain: nothing to move."""

    def drop(self, node: int) -> None:
        """A node is of no use any more."""
        self._has_run.discard(node)

    @staticmethod
    def top(hidden: Tensor) -> Tensor:
        """There are no other states."""
        return hidden

    def unread_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`."""
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Spend the final head's time."""
        self._clock.spend(self._times.head)
        return hidden
