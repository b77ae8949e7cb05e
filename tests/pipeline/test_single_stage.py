"""One stage with all layers: whatever is guessed, its tokens and their states are ordinary decoding's."""

import random
from dataclasses import replace

import pytest
import torch
from guessing_turns import TakesTurns
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench, begin_message

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import Cancel, Foreseen, Token
from ppd_runtime.pipeline.ports import next_wait
from ppd_runtime.pipeline.staged.drafters import Draft, Source
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT


class Foresight:
    """A drafter that names the right next token in a share of the places, else a wrong one; a cursor is a place."""

    def __init__(self, text, rate, seed, vocab_size):
        self.text, self.rate, self.vocab_size = text, rate, vocab_size
        self.random = random.Random(seed)

    def begin(self, prompt):
        self.newest = len(prompt)

    def follow(self, token):
        self.newest += 1

    def advance(self, cursor, token):
        return cursor + 1

    def guesses(self, cursor):
        right = self.text[cursor] if cursor < len(self.text) else 0
        wrong = self.random.random() >= self.rate
        token = (right + wrong * self.random.randrange(1, 5)) % self.vocab_size
        return [Draft(token, 0.5, Source.OWN_TEXT, 3)]


class SingleRun:
    """One request in one stage whose drafter has a foresight."""

    def __init__(self, bench, prompt, params, foresight=None, rows=4, policy=None, chains=True, told=(), **begin):
        self.sent = []
        recorded = bench.stage(bench.info.num_layers)
        self.begin = replace(begin_message(prompt, params), **begin)
        stage = TreeRange(recorded, MOST_HELD, told_layers=told)
        recorded.decisive.clear()
        self.machine = SingleStage(stage, rows, lambda to, m: self.sent.append((to, m)), self.begin, policy)
        self.machine._chooser.only_chains = chains
        if foresight:
            self.machine._chooser._drafters = [foresight]
        self.decisive = recorded.decisive
        self.running = self.machine.decode(Sampler(params, len(prompt)), bench._stop(params))

    def to_the_end(self, messages=()):
        """Go on; the messages come one at each look for one."""
        coming, reply = list(messages), None
        while True:
            try:
                next_wait(self.running, reply)
            except StopIteration:
                return [m.token_id for to, m in self.sent if isinstance(m, Token) and to == (CLIENT,)]
            reply = coming.pop(0) if coming else None


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama."""
    return Bench.of(model_folder("llama", num_layers=3))


@given(
    prompt=st.sampled_from(PROMPTS[:5]),
    rate=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    seed=st.integers(0, 999),
    rows=st.integers(1, 6),
    params=st.sampled_from([GREEDY, SAMPLED, SamplingParams(max_new_tokens=1)]),
    chains=st.booleans(),
    turns=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_any_guesses_any_rows(bench, prompt, rate, seed, rows, params, chains, turns):
    ids = bench.prompt_ids(prompt)
    expected = bench.ordinary(ids, params)
    foresight = Foresight([*ids, *expected.tokens], rate, seed, bench.info.vocab_size)
    run = SingleRun(bench, ids, params, foresight, rows, turns and TakesTurns(*turns), chains)
    assert run.to_the_end() == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(run.decisive, expected.decisive, strict=True))
    assert run.machine.foreseen <= run.machine.asked < max(len(expected.tokens), 1)


def test_tokens_that_were_rows_cost_no_pass(bench):
    ids = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(ids, GREEDY).tokens
    run = SingleRun(bench, ids, GREEDY, Foresight([*ids, *expected], 1.0, 0, bench.info.vocab_size), rows=4)
    assert run.to_the_end() == expected
    winners = [m.winner for to, m in run.sent if isinstance(m, Token)]
    assert winners == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, -1], "a pass for four tokens"
    assert run.machine.layer_passes == 3 * (1 + 13), "the prompt's, and a row for each token but the last"
    assert (run.machine.asked, run.machine.foreseen) == (13, 13)


def test_a_successor_goes_on_behind_what_the_client_has(bench):
    ids = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(ids, GREEDY)
    foresight = Foresight([*ids, *expected.tokens], 0.7, 0, bench.info.vocab_size)
    run = SingleRun(bench, ids, GREEDY, foresight, delivered=expected.tokens[:5])
    assert run.to_the_end() == expected.tokens[5:]
    assert all(torch.equal(a, b) for a, b in zip(run.decisive, expected.decisive[5:], strict=True))


def test_a_client_that_asks_hears_again_and_a_cancel_ends_it(bench):
    ids = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(ids, GREEDY).tokens
    run = SingleRun(bench, ids, GREEDY, foreseen=True)
    messages = [*[None] * 6, replace(run.begin, delivered=[]), *[None] * 4, Cancel(CLIENT, run.begin.request)]
    told = run.to_the_end(messages)
    assert run.machine.finish_reason == "cancelled"
    again = len(told) - (len(run.machine.history) - len(ids))
    assert 0 < again < len(told) < 14, "the first tokens twice, and none after the cancel"
    assert told == [*expected[:again], *expected[: len(told) - again]]
    boundaries = [m.boundary for _, m in run.sent if isinstance(m, Foreseen)]
    assert set(boundaries) <= {0, 1}
    assert len(boundaries) == len(run.machine.history) - len(ids)
