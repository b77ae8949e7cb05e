"""A draft model on a device of its own, on virtual clocks: stages and drafter take the formula's time."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from virtual_clock import Clock, VirtualNetwork, VirtualProcess, VirtualSampler
from virtual_stages import StageTimes, Text, VirtualBoundaryHead, VirtualRowStage

from ppd_runtime.cost_model import drafting
from ppd_runtime.pipeline.messages import Begin, Message, Token
from ppd_runtime.pipeline.staged.chances import Guess, GuessRecord
from ppd_runtime.pipeline.staged.draft_worker import DraftWorker
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.middle_stage import MiddleStage
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

WRONG = 10**6


class Drafting:
    """A draft model, and what ranks its logits: it names one token, right at drawn places where all before is right."""

    def __init__(self, chance: float, time: float, tokens: int) -> None:
        drawn = random.Random(3)
        self.clock, self.tokens = Clock(1.0, 1.0, 0.0, drawn), range(tokens)
        self._chance, self._time = chance, time
        self._is_right = [drawn.random() < chance for _ in range(tokens + 100)]

    def begin(self, capacity: int) -> None:
        pass

    def follow(self, tokens: Sequence[int], states: Any) -> None:
        """Reading what was no guess is part of the next draft."""

    def draft(self, chains: Sequence[Sequence[int]]) -> None:
        self.clock.spend(self._time)

    def guesses(self, logits: None, texts: Sequence[Sequence[int]], k: int) -> list[list[Guess]]:
        ((*text,),) = texts
        right = self._is_right[len(text)] and text[-1] == len(text) - 1
        return [[(len(text) if right else WRONG, self._chance)]]


def time_of_a_token(
    chance: float, draft: float, stages: int, layers: int, rows: int, tokens: int = 600
) -> tuple[float, float]:
    """The time of a token after the first, in layers' time, and the share of places where the draft model is right."""
    drafter, network, told = Drafting(chance, draft, tokens), VirtualNetwork(0.0, {}), list[float]()
    begin = Begin(CLIENT, 1, [0], SamplingParams(max_new_tokens=tokens, ignore_eos=True), live=True)

    def send(rank: int, addresses: Sequence[int], message: Message) -> None:
        if CLIENT in addresses and isinstance(message, Token):
            told.append(network.processes[rank].clock.now)
        network.send(rank, addresses, message)

    clocks = [Clock(1.0, 1.0, 0.0, random.Random(0)) for _ in range(stages)]
    places = [VirtualRowStage(layers, clock, StageTimes()) for clock in clocks]
    nobody = VirtualBoundaryHead(Text([stages] * tokens, [0] * tokens), 0, [0.0])
    sends = [partial(send, rank) for rank in range(stages + 1)]
    first = FirstStage(
        places[0], nobody, stages, 1, rows, sends[1], begin, GuessRecord(), repetitions=False, drafter=stages
    )
    last = LastStage(places[-1], layers * stages, range(1, stages), sends[0], begin, listeners=(stages,))
    params = begin.params
    machines = {1: first.serve(), DECIDER: last.decode(VirtualSampler(params), StopRule(params, frozenset(), None))}
    for rank in range(2, stages):
        machines[rank] = MiddleStage(places[rank - 1], nobody, rank, stages, 1, sends[rank], begin).serve()
    for rank, machine in machines.items():
        network.processes[rank] = VirtualProcess(clocks[(rank - 1) % stages], machine)
    asked = NetworkDrafts(drafter, drafter, 1, 0, lambda: 0.0, reads_prompt=True, reads_states=False)
    drafts = DraftWorker(asked, stages, 1, sends[stages], begin)
    network.processes[stages] = VirtualProcess(drafter.clock, drafts.serve())
    network.run()
    right = drafter._is_right[2 : tokens + 1]
    return (told[-1] - told[0]) / (len(told) - 1), sum(right) / len(right)


@pytest.mark.parametrize(("stages", "layers"), [(2, 40), (4, 20), (8, 10)])
@pytest.mark.parametrize("chance", [0.5, 0.75])
def test_a_quick_draft_model(stages: int, layers: int, chance: float) -> None:
    """80 layers of 20 ms, and drafts of 1 ms: a twentieth of a layer."""
    found, right = time_of_a_token(chance, 0.05, stages, layers, rows=16)
    waits = [drafting.draft_model_time(right, 0.05, stages, layers, waits) for waits in range(16)]
    assert found == pytest.approx(min(waits), rel=0.1)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_slow_draft_model(stages: int) -> None:
    """A mistake becomes known while a draft is under way, which ends first: half of its time, on average."""
    found, right = time_of_a_token(0.75, 12.0, stages, 10, rows=16)
    expected = drafting.draft_model_time(right, 12.0, stages, 10) + (1 - right) * 12.0 / 2
    assert found == pytest.approx(expected, rel=0.15)


def test_what_nobody_foresees_takes_ordinary_decodings_time() -> None:
    found, _ = time_of_a_token(0.0, 0.05, 4, 20, rows=16, tokens=50)
    assert found == pytest.approx(80, rel=0.01)
