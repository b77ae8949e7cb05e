"""A drafter's network beside one stage: its guesses save passes and never change a token."""

import random
from dataclasses import replace

import pytest
import torch
from guessing_turns import TakesTurns
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench
from test_single_stage import SingleRun

from ppd_runtime.pipeline.staged.chances import NETWORK, GuessRecord, Successors
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.sampling.sampler import Sampler


class ToldNetwork:
    """Knows the text, and names its next token in a share of the places; checks that it is fed as a drafter has to be.

    Args:
        prompt: token ids.
        expected: what ordinary decoding made of it.
        rate: share of right guesses.
        vocab_size: the model's.
    """

    def __init__(self, prompt, expected, rate, vocab_size):
        self.text, self.states = [*prompt, *expected.tokens], [None] * (len(prompt) - 1) + expected.decisive
        self.rate, self.tokens, self.random = rate, range(vocab_size), random.Random(0)
        self.drafts, self.position, self.capacities = 0, 0, []

    def begin(self, capacity):
        self.position = 0
        self.capacities.append(capacity)

    def follow(self, tokens, states):
        known = enumerate(self.states)
        place = 1 + next(i for i, state in known if state is not None and torch.equal(state[0, 0], states[0, 0]))
        assert self.position in (0, place), "there is no gap"
        self.position = place + len(tokens)
        assert list(tokens) == self.text[place : self.position]
        assert torch.equal(states, torch.cat(self.states[place - 1 : self.position - 1], dim=1)[0, :, None])

    def draft(self, chains):
        self.drafts += 1
        logits = torch.zeros(len(chains), len(self.tokens))
        for row, chain in zip(logits, chains, strict=True):
            place = self.position + len(chain)
            right = self.text[place] if place < len(self.text) else 0
            wrong = self.random.random() >= self.rate
            row[(right + wrong) % len(self.tokens)] = 9.0
        return logits.log_softmax(-1)


class NetworkRun(SingleRun):
    """A request in one stage whose drafter's network knows the text."""

    def __init__(self, bench, prompt, params, rate, seconds=0.0, **settings):
        super().__init__(bench, prompt, params, **settings)
        self.expected = bench.ordinary(prompt, params)
        self.network = ToldNetwork(prompt, self.expected, rate, bench.info.vocab_size)
        ranking = Sampler(replace(params, temperature=0.0), len(prompt))
        drafts = NetworkDrafts(self.network, ranking, 3, params.max_new_tokens + 64, lambda: seconds)
        self.machine._network = self.machine._chooser._network = drafts
        self.machine._chooser._drafters = []

    def check(self):
        assert self.to_the_end() == self.expected.tokens[len(self.begin.delivered) :]
        decisive = self.expected.decisive[len(self.begin.delivered) :]
        assert all(torch.equal(a, b) for a, b in zip(self.decisive, decisive, strict=True))


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama."""
    return Bench.of(model_folder("llama", num_layers=3))


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("turns", [None, (2, 3)])
def test_any_guesses(bench, rate, params, turns):
    """Also where guessing stops and goes on: the network then hears of all tokens since, or begins anew."""
    policy = turns and TakesTurns(*turns)
    run = NetworkRun(bench, bench.prompt_ids(PROMPTS[3]), params, rate, rows=5, policy=policy, chains=False)
    run.check()
    assert run.network.drafts
    *while_running, at_the_end = run.network.capacities
    assert set(while_running) == {params.max_new_tokens + 64}
    assert at_the_end == 0, "its memory is free"


def test_right_guesses_save_passes(bench):
    run = NetworkRun(bench, bench.prompt_ids(PROMPTS[3]), GREEDY, 1.0, rows=4)
    run.check()
    hits = run.machine.foreseen
    assert run.machine.asked - hits <= 1, "the first certain token has no state before it"
    assert run.machine.layer_passes < 3 * (1 + 1.5 * 13)


def test_a_successor_begins_behind_what_the_client_has(bench):
    ids = bench.prompt_ids(PROMPTS[3])
    delivered = bench.ordinary(ids, GREEDY).tokens[:5]
    run = NetworkRun(bench, ids, GREEDY, 1.0, delivered=delivered)
    run.check()
    assert run.machine.foreseen > 4


def test_a_network_that_costs_more_than_it_may_save_is_not_asked(bench):
    run = NetworkRun(bench, bench.prompt_ids(PROMPTS[3]), GREEDY, 1.0, seconds=1e-9)
    run.check()
    assert run.network.drafts == 1, "once, until its time is known"


def test_the_more_confident_of_text_and_network_counts():
    record, named = GuessRecord(), Successors({0: [(5, 0.38)], NETWORK: [(5, 0.2), (6, 0.7)]})
    assert named.chances(record) == pytest.approx({5: 0.38, 6: 0.7})
    assert (named.first_boundary(6), named.first_boundary(7)) == (0, None)
    named.learn(record, 6)
    assert record.chance(NETWORK, 1, 0.7) > 0.7
    assert record.chance(0, 0, 0.38) < 0.38
    named.by_boundary[1] = [(7, 0.6)]
    found = named.chances(record)
    assert found[7] == 0.6, "nothing is known of the boundaries, so the later one is believed"
    assert max(found[5], found[6]) == pytest.approx(0.4), "the others share what it leaves"
    for _ in range(12):
        named.learn(record, 6)
    assert named.chances(record)[6] > named.chances(record)[7], "the network was right, the boundary was not"
