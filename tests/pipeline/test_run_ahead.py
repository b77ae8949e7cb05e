"""The sub-process that runs ahead: whatever it guesses and whenever it hears of it, tokens stay ordinary decoding's."""

import contextlib
import itertools

import pytest
import torch
from grids import nightly
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench, Decoded, begin_message, rehearsed, same
from seeds import SEED

from ppd_runtime.pipeline.messages import MISS, Candidate, End, Entries, ExitState, HeadStart, Token
from ppd_runtime.pipeline.paper.run_ahead import RunAheadSubProcess
from ppd_runtime.pipeline.ports import next_wait
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import DECIDER

DEPTH, EXIT = 6, 3


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama of even depth."""
    return Bench.of(model_folder("llama", num_layers=DEPTH))


def run(bench: Bench, params: SamplingParams, rate: float, **options: object) -> tuple[Decoded, Decoded]:
    prompt = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(prompt, params)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size, seed=3)
    return bench.pipelined(prompt, params, 1, EXIT, head, run_ahead=True, **options), expected


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_in_fair_order_every_right_candidate_is_used(bench, rate):
    got, expected = run(bench, GREEDY, rate)
    same(got, expected)
    compared = len(expected.tokens) - 1
    assert got.main.layer_passes == DEPTH * len(expected.tokens) - EXIT * got.hits
    assert got.main.recomputed_layer_passes == 0
    assert got.main.stage.layer_passes == got.main.layer_passes
    (sub,) = got.subs
    assert sub.stage.layer_passes == sub.layer_passes + sub.coherence_layer_passes
    assert sub.coherence_layer_passes // EXIT - 1 in (compared - got.hits - 1, compared - got.hits)
    assert got.hits == (rate * compared if rate in (0.0, 1.0) else pytest.approx(compared / 2, abs=4))
    sent = [message for _, message in got.network.sent]
    assert not any(isinstance(message, ExitState) for message in sent)
    assert not any(isinstance(message, Token) and message.hidden is not None for message in sent)
    shipped = [m.position + i for m in sent if isinstance(m, Entries) for i in range(len(m.entries))]
    assert shipped == sorted(set(shipped)), "no token's entries twice"
    won = [i for i, winner in enumerate(got.winners, len(bench.prompt_ids(PROMPTS[3]))) if winner == 1]
    assert set(shipped) <= set(won)
    assert len(shipped) >= len(won) - 8
    ahead = [message for message in sent if isinstance(message, Candidate) and message.path]
    assert ahead, "a token is started before the one in front of it is certain"
    assert max(len(message.path) for message in ahead) == 1
    last = len(bench.prompt_ids(PROMPTS[3])) + GREEDY.max_new_tokens - 2
    assert max(m.position for m in sent if isinstance(m, Candidate | HeadStart)) == last, "none that nobody needs"


def test_with_the_models_own_head(bench):
    for params in (GREEDY, SAMPLED):
        for text in PROMPTS[::3]:
            prompt = bench.prompt_ids(text)
            same(bench.pipelined(prompt, params, 1, EXIT, run_ahead=True), bench.ordinary(prompt, params))


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_layers_with_windows(model_folder, family):
    bench = Bench.of(model_folder(family, num_layers=DEPTH, dtype="bfloat16"), "bfloat16")
    got, expected = run(bench, SAMPLED, 0.6, seed=2)
    same(got, expected)
    assert got.hits


ANY = given(
    pattern=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([0.2, 0.5, 0.8, 0.95]),
    order=st.integers(0, 2**32 - 1),
    impatience=st.sampled_from([0.0, 0.05, 0.3]),
    length=st.integers(1, 24),
    sampled=st.booleans(),
)


@ANY
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_hit_pattern_any_order_any_straggler(bench, pattern, rate, order, impatience, length, sampled):
    check_any(bench, pattern, rate, order, impatience, length, sampled)


@nightly
@ANY
@settings(max_examples=300, deadline=None)
@seed(SEED)
def test_many_hit_patterns_orders_and_stragglers(bench, pattern, rate, order, impatience, length, sampled):
    check_any(bench, pattern, rate, order, impatience, length, sampled)


def check_any(bench, pattern, rate, order, impatience, length, sampled):
    """Chains dropped in the middle of a pass, late candidates, early starts from a text that never came to be."""
    params = SamplingParams(max_new_tokens=length, temperature=0.8 * sampled, seed=5, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[pattern % len(PROMPTS)])
    expected = bench.ordinary(prompt, params)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size, pattern)
    got = bench.pipelined(prompt, params, 1, EXIT, head, order, impatience, run_ahead=True)
    same(got, expected)
    assert got.main.layer_passes == DEPTH * length - EXIT * got.hits
    assert got.main.stage.layer_passes == got.main.layer_passes + got.main.recomputed_layer_passes
    (sub,) = got.subs
    assert sub.stage.layer_passes == sub.layer_passes + sub.coherence_layer_passes


def test_a_lost_one_costs_no_token(bench):
    got, expected = run(bench, GREEDY, 1.0, lost=(1,))
    same(got, expected)
    assert got.hits == 0


@pytest.mark.parametrize("winners", list(itertools.product([1, MISS], repeat=3)), ids=str)
def test_a_new_life_owes_no_entries_of_early_starts_that_it_has_not_made(bench, winners):
    """The main process may use what was sent before a restart: all entries that leave are those of the text."""
    prompt = bench.prompt_ids(PROMPTS[3])
    text = [*prompt, *bench.ordinary(prompt, GREEDY).tokens]
    sent = []
    wrong = rehearsed(prompt, text[len(prompt) :], 0.0, bench.info.vocab_size, seed=3)

    def send(_, message):
        sent.append(message)

    sub = RunAheadSubProcess(bench.stage(DEPTH - EXIT), wrong, 1, send, begin_message(prompt, GREEDY))
    first = len(prompt)
    tokens = [Token(DECIDER, 1, first + i, text[first + i], winner) for i, winner in enumerate((*winners, MISS))]
    machine, coming = sub.serve(), [*tokens, None, None, None, None, None, None, End(DECIDER, 1)]
    next_wait(machine, None)
    with contextlib.suppress(StopIteration):
        for message in coming:
            next_wait(machine, message)
    reference = bench.stage(DEPTH - EXIT)
    reference.begin(len(text))
    reference.run(0, DEPTH - EXIT, prompt, 0)
    for position in range(first, first + 4):
        reference.run(0, DEPTH - EXIT, [text[position]], position)
    for shipped in (message for message in sent if isinstance(message, Entries)):
        end = shipped.position + len(shipped.entries)
        assert torch.equal(shipped.entries, reference.export_entries(shipped.position, end, DEPTH - EXIT))
