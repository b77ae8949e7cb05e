"""The paper's machines on virtual clocks: what decoding takes for given times, without a model or a machine."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from virtual_clock import Clock, VirtualExitHead, VirtualNetwork, VirtualProcess, VirtualSampler, VirtualStage

from ppd_runtime.cost_model.theory import Times
from ppd_runtime.pipeline.messages import MISS, Begin, Token
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import can_run_ahead
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

_Sub = SubProcess | RunAheadSubProcess


@dataclass(frozen=True)
class Setting:
    """What is simulated; times in any one unit."""

    num_layers: int
    exit_layer: int
    k: int
    num_new_tokens: int
    times: Times = field(default_factory=Times)
    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on all work of a process, by rank; 0 is the main process."""
    workers: int | None = None
    """Sub-processes, at most k; None is one for each candidate."""
    run_ahead: bool = True
    """Whether a lone sub-process goes on without exit states where it can, as the runtime's does."""

    @property
    def runs_ahead(self) -> bool:
        """Whether it does: with one candidate a token and the exit at half depth."""
        return self.run_ahead and can_run_ahead(self.num_layers, self.exit_layer, self.k)

    @property
    def num_subs(self) -> int:
        """Sub-processes that there are."""
        return self.k if self.workers is None else self.workers

    def candidates_of(self, rank: int) -> int:
        """Candidates of the sub-process of this rank, 1 to `num_subs`."""
        return len(range(rank, self.k + 1, self.num_subs))

    def width_of(self, rank: int) -> float:
        """What its pass over them takes, in passes over one: `times.width` for the most that a sub-process has."""
        own, most = self.candidates_of(rank), self.candidates_of(1)
        return 1 + (self.times.width - 1) * (own - 1) / (most - 1) if own > 1 else 1.0


@dataclass(frozen=True)
class Simulated:
    """One simulated generation, in the setting's unit of time."""

    time: float
    """From the request to its last token."""
    hits: int
    misses: int
    """Tokens for which no candidate was right, or none was there in time."""
    main_layer_passes: int
    """On the path of the tokens: d·ℓ − (d − d̄)·hits."""
    main_recomputed_layer_passes: int
    """For entries that no sub-process delivered in time."""
    sub_layer_passes: tuple[int, ...]
    """Of each sub-process, d − d̄ for each candidate; Theorem 4.1 counts the last token's too, which needs none."""
    stall_time: float
    """What the main process spent waiting for sub-processes."""

    @property
    def layer_passes(self) -> int:
        """Of all processes, for tokens and candidates: what Theorem 4.1 counts."""
        return self.main_layer_passes + sum(self.sub_layer_passes)


def simulate(setting: Setting, winners: Sequence[int]) -> Simulated:
    """Simulate one generation.

    `winners` holds, for each token that another one follows (ℓ − 1 of them), the rank of the candidate that is right
    for the next one, or 0 where none is. Candidates are asked for always.
    """
    network = VirtualNetwork(setting.times.hop, {})
    main = _add_main(network, setting)
    subs = [_add_sub(network, setting, rank, winners) for rank in _ranks(setting)]
    network.run()
    return _result(network, main, subs)


def draw_winners(setting: Setting, match_rate: float, generator: random.Random) -> list[int]:
    """Winners for `simulate`: each right with probability `match_rate`, at a rank drawn from all with equal odds."""
    return [
        generator.randint(1, setting.k) if generator.random() < match_rate else MISS
        for _ in range(setting.num_new_tokens - 1)
    ]


def simulate_runs(setting: Setting, match_rate: float, runs: int, seed: int = 0) -> list[Simulated]:
    """Simulate several generations whose hits are drawn at random with probability `match_rate` a token."""
    generator = random.Random(seed)
    return [simulate(setting, draw_winners(setting, match_rate, generator)) for _ in range(runs)]


def _add_main(network: VirtualNetwork, setting: Setting) -> MainProcess:
    params = SamplingParams(max_new_tokens=setting.num_new_tokens)
    clock = _clock(setting, DECIDER)
    stage = VirtualStage(clock, setting.num_layers, setting.times.head)
    send, asked = partial(network.send, DECIDER), not setting.runs_ahead
    main = MainProcess(stage, setting.exit_layer, _ranks(setting), send, _begin(setting), asked)
    machine = main.decode(VirtualSampler(params), StopRule(params, frozenset(), None))
    network.processes[DECIDER] = VirtualProcess(clock, machine)
    return main


def _add_sub(network: VirtualNetwork, setting: Setting, rank: int, winners: Sequence[int]) -> _Sub:
    clock = _clock(setting, rank)
    clock.now = network.hop_between(DECIDER, rank)  # it begins when the request reaches it
    stage = VirtualStage(clock, setting.num_layers - setting.exit_layer, width=setting.width_of(rank))
    head = VirtualExitHead(clock, setting.times.exit_head, winners)
    send, begin = partial(network.send, rank), _begin(setting)
    sub: _Sub
    if setting.runs_ahead:
        sub = RunAheadSubProcess(stage, head, rank, send, begin)
    else:
        sub = SubProcess(stage, head, rank, _ranks(setting), setting.k, send, begin)
    network.processes[rank] = VirtualProcess(clock, sub.serve())
    return sub


def _clock(setting: Setting, rank: int) -> Clock:
    return Clock(setting.times.layer, setting.slow.get(rank, 1.0), 0.0, random.Random(0))


def _ranks(setting: Setting) -> range:
    return range(1, setting.num_subs + 1)


def _begin(setting: Setting) -> Begin:
    """A request with a prompt of one token."""
    return Begin(CLIENT, 0, [0], SamplingParams(setting.num_new_tokens, ignore_eos=True), live=True)


def _result(network: VirtualNetwork, main: MainProcess, subs: Sequence[_Sub]) -> Simulated:
    winners = [message.winner for message in network.to_client if isinstance(message, Token)]
    process = network.processes[DECIDER]
    return Simulated(
        time=process.clock.now,
        hits=sum(winner > MISS for winner in winners),
        misses=winners.count(MISS),
        main_layer_passes=main.layer_passes,
        main_recomputed_layer_passes=main.recomputed_layer_passes,
        sub_layer_passes=tuple(sub.layer_passes for sub in subs),
        stall_time=process.stalled,
    )
