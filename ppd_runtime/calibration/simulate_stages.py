"""The staged layout's machines on virtual clocks, over a text whose tokens are first named at random boundaries.

There is no model: the text is the numbers 0, 1, 2, …, as in `simulated_cluster`. What a head names besides the right
token nobody else names. Heads know how often they are right, not where: a model's know better, and need fewer rows.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ppd_runtime.calibration.simulated_cluster import Clock, VirtualSampler
from ppd_runtime.calibration.simulated_stages import ClockedHead, Machines, SimulatedText, StageTimes
from ppd_runtime.checks import check_cuts, check_number, check_whole, stage_layers
from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.theory import Times, miss_time
from ppd_runtime.pipeline.messages import CLIENT, Begin
from ppd_runtime.pipeline.staged.chances import ChanceCalibration
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.text import StopRule

_NEXT_RANK = 0.25
"""How likely a rank is to hold the right token, to the rank before it; the demo model's heads have about that."""


@dataclass(frozen=True)
class StagedSetting:
    """What is simulated; times in any one unit.

    Raises:
        ValueError: naming the value and the allowed range.
    """

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

    def __post_init__(self) -> None:
        check_cuts(self.num_layers, self.cuts)
        for name, least in (("k", 1), ("rows", 1), ("num_new_tokens", 2)):
            check_whole(name, getattr(self, name), least)
        for name in ("layer", "head", "exit_head", "hop", "row_cost", "besides"):
            check_number(name, getattr(self.times, name))
        check_number("jitter", self.jitter)
        if self.ranks and (len(self.ranks) != self.k or min(self.ranks) < 0 or not sum(self.ranks)):
            raise ValueError(f"ranks={self.ranks}: give a share for each of {self.k} candidates")
        if not self.times.layer:
            raise ValueError("layer=0: a simulation needs layers that take time; give a number above 0")
        for factors in (self.slow, self.slow_links):
            self._check_factors(factors)

    def _check_factors(self, factors: Mapping[int, float]) -> None:
        for rank, factor in factors.items():
            if not 0 <= rank < self.stages:
                raise ValueError(f"rank={rank}: with {self.stages} stages choose 1 to {self.stages - 1}, 0 is the last")
            check_number(f"factor of rank {rank}", factor)
            if factor == 0:
                raise ValueError(f"factor of rank {rank}=0: give a number above 0; 1 changes nothing")

    @property
    def stages(self) -> int:
        """Processes in a row."""
        return len(self.cuts) + 1

    @property
    def ordinary_time(self) -> float:
        """Ordinary decoding's time for a token."""
        return miss_time(self.num_layers, Times(self.times.layer, self.times.head))


@dataclass(frozen=True)
class StagedSummary:
    """What a generation comes to on average, by the formulas or in simulations."""

    time_per_token: float
    """The whole time over the number of tokens."""
    ratio: float
    """Time as a share of ordinary decoding's."""
    first_boundary: tuple[float, ...]
    """Tokens that boundary 1, 2, … was the first to name, and last those that none named."""
    rows_per_token: float
    """Of the first stage."""
    time_per_token_error: float | None = None
    """Standard error of the mean; None for a prediction, or a single run."""


def predict_stages(setting: StagedSetting, shares: Sequence[float]) -> StagedSummary:
    """What `cost_model.staged` says: without jitter, slow stages or links, and with room for every candidate."""
    asked = setting.times
    times = Times(asked.layer, asked.head, asked.exit_head, asked.hop + asked.besides)
    tokens = setting.num_new_tokens
    per_token = staged.expected_time(setting.num_layers, setting.cuts, shares, tokens, times) / tokens
    return StagedSummary(
        time_per_token=per_token,
        ratio=per_token / setting.ordinary_time,
        first_boundary=tuple(share * (tokens - 1) for share in shares),
        rows_per_token=1 + staged.dropped_rows(setting.k, shares),
    )


def simulate_staged_runs(
    setting: StagedSetting, shares: Sequence[float], runs: int, seed: int = 0
) -> list[SimulatedText]:
    """Simulate generations whose first boundaries are drawn, each with its share; see `staged.check_shares`."""
    staged.check_shares(shares, setting.stages)
    check_whole("runs", runs, 1)
    check_whole("seed", seed, 0)
    generator, calibration = random.Random(seed), ChanceCalibration()
    return [_simulate(setting, shares, generator, calibration) for _ in range(runs)]


def summarise_staged(setting: StagedSetting, runs: Sequence[SimulatedText]) -> StagedSummary:
    """The means of simulated generations."""
    per_token = [run.time / setting.num_new_tokens for run in runs]
    mean = statistics.fmean(per_token)
    return StagedSummary(
        time_per_token=mean,
        ratio=mean / setting.ordinary_time,
        first_boundary=tuple(map(statistics.fmean, zip(*(run.first_boundary for run in runs), strict=True))),
        rows_per_token=statistics.fmean(run.rows_per_token for run in runs),
        time_per_token_error=statistics.stdev(per_token) / len(runs) ** 0.5 if len(runs) > 1 else None,
    )


def _simulate(
    setting: StagedSetting, shares: Sequence[float], generator: random.Random, calibration: ChanceCalibration
) -> SimulatedText:
    ranks = setting.ranks or [_NEXT_RANK**rank for rank in range(setting.k)]
    size, tokens = setting.stages, setting.num_new_tokens
    text = _Text(
        first_boundary=generator.choices(range(1, size + 1), shares, k=tokens),
        ranks=generator.choices(range(setting.k), ranks, k=tokens),
    )
    clocks = [_clock(setting, (number + 1) % size, generator) for number in range(size)]
    layers = stage_layers(setting.num_layers, setting.cuts)
    said = [[share * rank / sum(ranks) for rank in ranks] for share in (*staged.cumulative_shares(shares), 0.0)]
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
class _Text:
    """For the tokens at positions 1, 2, …: the first boundary that names each, and its rank there, from 0."""

    first_boundary: Sequence[int]
    ranks: Sequence[int]


class VirtualBoundaryHead:
    """Names the right token from its first boundary on, and what is never right besides.

    Args:
        boundary: the number of its own.
        said: how likely it says its candidates are, by rank.
    """

    def __init__(self, text: _Text, boundary: int, said: Sequence[float]) -> None:
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
    """A `RowStageLike` that computes nothing: it spends time, and knows which nodes have run."""

    def __init__(self, num_layers: int, clock: Clock, times: StageTimes) -> None:
        self.num_layers, self.rows, self.layer_passes = num_layers, 0, 0
        self._clock, self._times = clock, times
        self._has_run: set[int] = set()
        self.cached_tokens, self.layers_at_once = 0, 1

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

    def logits(self, hidden: Tensor) -> Tensor:
        """Spend the final head's time."""
        self._clock.spend(self._times.head)
        return hidden
