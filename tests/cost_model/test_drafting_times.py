"""Drafters at boundary 0 on virtual clocks: the machines take what the formulas say.

The text and the drafter are as the formulas assume: behind every right token the drafter is right with one chance.
What the formulas leave out, and the tolerances allow for:

- chance: a text's own shares are used, but not how its right guesses happen to follow each other;
- the moment, up to a layer, that the first stage waits for later ones: so a stage has many layers here;
- guesses that are too unlikely to get a row, though there is room for it;
- with one row a pass none of these matters but the wait.
"""

import random
from itertools import accumulate

import pytest
from virtual_clock import Clock, VirtualNetwork, VirtualProcess, VirtualSampler
from virtual_stages import Machines, StageTimes, Text, VirtualBoundaryHead, VirtualRowStage

from ppd_runtime.cost_model import drafting
from ppd_runtime.pipeline.messages import Begin
from ppd_runtime.pipeline.staged import row_chooser
from ppd_runtime.pipeline.staged.chances import GuessRecord
from ppd_runtime.pipeline.staged.drafters import Draft, Source
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

LAYERS = 32
"""Of a stage; the unit of time is one layer."""
TOKENS = 600
PARAMS = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
BEGIN = Begin(CLIENT, 1, [0], PARAMS, live=True)


class VirtualDrafter:
    """Names the right token where boundary 0 is the first to do so, else one that is never right.

    A cursor is the number of tokens and the last one.

    Args:
        first_boundary: of the tokens at positions 1, 2, …
        said: how likely it says its tokens are.
        clock: of its process.
        seconds: what it takes behind each node.
    """

    def __init__(self, first_boundary, said, clock, seconds=0.0):
        self._first_boundary, self._said, self._clock, self._seconds = first_boundary, said, clock, seconds

    def begin(self, prompt):
        self.newest = len(prompt), prompt[-1]

    def follow(self, token):
        self.newest = self.advance(self.newest, token)

    def advance(self, cursor, token):
        return cursor[0] + 1, token

    def guesses(self, cursor):
        self._clock.spend(self._seconds)
        position, last = cursor
        knows = last == position - 1 and position <= TOKENS and self._first_boundary[position - 1] == 0
        return [Draft(position if knows else -position, self._said, Source.OWN_TEXT, 2)]


def time_of_a_token(shares, rows, times, monkeypatch, draft_s=0.0):
    """Time of a token after the first, and the text's own shares of J = 0, 1, …, N."""
    stages, generator = len(shares) - 1, random.Random(1)
    first_boundary = generator.choices(range(stages + 1), shares, k=TOKENS)
    clocks = [Clock(times.layer, 1.0, 0.0, generator) for _ in range(stages)]
    drafter = VirtualDrafter(first_boundary, shares[0], clocks[0], draft_s)
    monkeypatch.setattr(row_chooser, "OwnText", lambda: drafter)
    own = [first_boundary.count(boundary) / TOKENS for boundary in range(stages + 1)]
    passes = [VirtualRowStage(LAYERS, clock, times) for clock in clocks]
    if stages == 1:
        return _on_one_stage(passes[0], clocks[0], rows, times), own
    text, said = Text(first_boundary, [0] * TOKENS), [*accumulate(shares[1:-1], initial=shares[0])][1:]
    heads = [VirtualBoundaryHead(text, boundary, [share]) for boundary, share in enumerate([*said, 0.0], start=1)]
    machines = Machines(LAYERS * stages, passes, heads, clocks, 1, rows, GuessRecord())
    return machines.run(BEGIN, VirtualSampler(PARAMS), StopRule(PARAMS, frozenset(), None)).time_per_token, own


def _on_one_stage(stage, clock, rows, times):
    network, told = VirtualNetwork(0.0, {}), []
    single = SingleStage(
        stage, rows, lambda addresses, message: told.append(clock.now), BEGIN, None, GuessRecord(), True, times.row_cost
    )
    machine = single.decode(VirtualSampler(PARAMS), StopRule(PARAMS, frozenset(), None))
    network.processes[DECIDER] = VirtualProcess(clock, machine)
    network.run()
    return (told[-1] - told[0]) / (TOKENS - 1)


@pytest.mark.parametrize("chance", [0.5, 0.8, 1.0])
@pytest.mark.parametrize(("rows", "row_cost", "draft_s"), [(1, 0.0, 0.0), (2, 0.1, 0.0), (4, 0.05, 1.0), (4, 0.0, 0.0)])
def test_one_stage(monkeypatch, chance, rows, row_cost, draft_s):
    """The drafter is asked behind each row of a pass."""
    found, (right, _) = time_of_a_token((chance, 1 - chance), rows, StageTimes(row_cost=row_cost), monkeypatch, draft_s)
    speedup = drafting.speedup(drafting.chain([right] * (rows - 1)), row_cost, rows * draft_s / LAYERS)
    assert LAYERS / found == pytest.approx(speedup, rel=0.03)


@pytest.mark.parametrize(
    "shares",
    [(0.5, 0.2, 0.3), (0.9, 0.1, 0.0), (0.5, 0.2, 0.1, 0.1, 0.1), (0.8, 0.1, 0.05, 0.05, 0.0), (0.3, 0, 0, 0, 0.7)],
)
@pytest.mark.parametrize(("rows", "tolerance"), [(1, 0.005), (2, 0.03), (8, 0.03)])
def test_stages(monkeypatch, shares, rows, tolerance):
    found, own = time_of_a_token(shares, rows, StageTimes(), monkeypatch)
    assert found / LAYERS == pytest.approx(drafting.expected_first_boundary(own, rows), rel=tolerance)
