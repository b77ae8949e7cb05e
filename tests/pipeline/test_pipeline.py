"""The state machines with real stages: every token is ordinary decoding's, bitwise, and every pass is counted."""

import contextlib
import itertools
import math
import random

import pytest
import torch
from grids import nightly, pairs_first
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench, begin_message, rehearsed, same
from seeds import SEED
from virtual_clock import Clock, VirtualExitHead, VirtualSampler, VirtualStage

from ppd_runtime.models.checkpoint.description import load_tokenizer
from ppd_runtime.pipeline.messages import MISS, NOT_ASKED, Candidate, Entries, ExitState, HeadStart, Token
from ppd_runtime.pipeline.paper.main_process import MainProcess
from ppd_runtime.pipeline.paper.sub_process import SubProcess
from ppd_runtime.pipeline.ports import next_wait
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

PENALISED = SamplingParams(max_new_tokens=14, repetition_penalty=1.3, ignore_eos=True)


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama of odd depth."""
    return Bench.of(model_folder("llama", num_layers=5))


def agree(got, expected, k, workers):
    """The same bits; the same tokens where siblings share a pass, which may round otherwise."""
    if workers == k:
        same(got, expected)
    else:
        assert (got.tokens, got.reason) == (expected.tokens, expected.reason)


@pytest.mark.parametrize(
    ("family", "num_layers", "dtype"),
    pairs_first(["llama", "mistral", "qwen2", "qwen3", "gemma2"], [4, 5], ["float32", "bfloat16"]),
)
def test_bitwise_equal_at_every_exit_layer(model_folder, family, num_layers, dtype):
    bench = Bench.of(model_folder(family, num_layers=num_layers, dtype=dtype), dtype)
    prompts = [bench.prompt_ids(text) for text in PROMPTS]
    exit_layers = itertools.cycle(range(math.ceil(num_layers / 2), num_layers))
    for exit_layer, (k, params) in zip(exit_layers, ((1, SAMPLED), (3, GREEDY), (5, PENALISED)), strict=False):
        prompt = prompts[(exit_layer + k) % len(prompts)]
        expected = bench.ordinary(prompt, params)
        head = rehearsed(prompt, expected.tokens, 0.6, bench.info.vocab_size, seed=k)
        same(bench.pipelined(prompt, params, k, exit_layer, head, seed=exit_layer), expected)


@pytest.mark.parametrize(
    ("k", "workers", "params"),
    [(3, 3, GREEDY), (3, 3, PENALISED), (3, 1, SAMPLED), (4, 3, PENALISED), (4, 3, GREEDY), (5, 2, SAMPLED)],
)
def test_ordinary_decodings_with_the_models_own_head(bench, k, workers, params):
    for text in PROMPTS[1::3]:
        prompt = bench.prompt_ids(text)
        agree(bench.pipelined(prompt, params, k, 3, workers=workers), bench.ordinary(prompt, params), k, workers)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("exit_layer", [3, 4])
@pytest.mark.parametrize("k", [1, 3])
def test_layer_passes_are_those_of_theorem_4_1(bench, rate, exit_layer, k):
    prompt = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(prompt, GREEDY)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size)
    got = bench.pipelined(prompt, GREEDY, k, exit_layer, head)
    same(got, expected)
    depth, early = bench.info.num_layers, bench.info.num_layers - exit_layer
    compared = len(got.tokens) - 1
    misses = compared - got.hits
    assert got.main.layer_passes == depth * len(got.tokens) - early * got.hits
    assert got.main.stage.layer_passes == got.main.layer_passes, "nothing was computed off the books"
    assert got.main.recomputed_layer_passes == 0
    for sub in got.subs:
        started = sum(isinstance(m, HeadStart) and m.sender == sub.rank for _, m in got.network.sent)
        assert sub.layer_passes == early * started
        assert started == compared if k == 1 else started <= compared  # others may learn of a hit before they start
        assert sub.coherence_layer_passes // early - 1 in (misses - 1, misses)  # the end may overtake the last one
        assert sub.stage.layer_passes == sub.layer_passes + sub.coherence_layer_passes
    if rate in (0.0, 1.0):
        assert got.hits == rate * compared
    else:
        assert 0 < got.hits < compared


def test_without_a_hit_main_does_exactly_what_ordinary_decoding_does(bench):
    prompt = bench.prompt_ids(PROMPTS[2])
    expected = bench.ordinary(prompt, GREEDY)
    got = bench.pipelined(prompt, GREEDY, 2, 3, rehearsed(prompt, expected.tokens, 0.0, bench.info.vocab_size))
    assert got.main.layer_passes == bench.info.num_layers * len(expected.tokens)
    assert set(got.winners) == {MISS, NOT_ASKED}
    kinds = [type(message).__name__ for to, message in got.network.sent if to == 1]
    assert kinds == ["Begin", *["ExitState", "Token"] * (len(expected.tokens) - 1), "End"]


@pytest.mark.parametrize(("where", "rate"), [(0, 1.0), (1, 0.0), (5, 1.0), (13, 0.0)])
def test_eos_inside_the_text_ends_it_there(bench, where, rate):
    prompt = bench.prompt_ids(PROMPTS[1])
    tokens = bench.ordinary(prompt, GREEDY).tokens
    ending = bench.with_eos(tokens[where])
    params = SamplingParams(max_new_tokens=14)
    expected = ending.ordinary(prompt, params)
    assert expected.tokens == tokens[: tokens.index(tokens[where]) + 1]
    got = ending.pipelined(prompt, params, 3, 3, rehearsed(prompt, tokens, rate, bench.info.vocab_size))
    same(got, expected)
    assert got.reason == "eos"
    assert got.winners[-1] == NOT_ASKED


def test_stop_text_ends_the_same_way(bench):
    prompt = bench.prompt_ids(PROMPTS[1])
    text = bench.ordinary(prompt, GREEDY)
    piece = load_tokenizer(bench.info).decode(text.tokens[4:6])
    params = SamplingParams(max_new_tokens=14, stop=(piece,), ignore_eos=True)
    expected = bench.ordinary(prompt, params)
    same(bench.pipelined(prompt, params, 3, 3), expected)
    assert expected.reason == "stop"


def test_one_new_token_asks_for_no_candidate(bench):
    prompt = bench.prompt_ids(PROMPTS[0])
    params = SamplingParams(max_new_tokens=1)
    got = bench.pipelined(prompt, params, 3, 3)
    same(got, bench.ordinary(prompt, params))
    assert all(sub.layer_passes == 0 for sub in got.subs)


ANY = given(
    pattern=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([0.2, 0.5, 0.8, 0.95, 1.0]),
    layout=st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 4), (3, 1), (4, 2), (4, 3), (5, 2)]),
    exit_layer=st.integers(3, 4),
    order=st.integers(0, 2**32 - 1),
    impatience=st.sampled_from([0.0, 0.05, 0.3]),
    length=st.integers(1, 24),
    sampled=st.booleans(),
)


@ANY
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_hit_pattern_any_order_any_straggler(
    bench, pattern, rate, layout, exit_layer, order, impatience, length, sampled
):
    check_any(bench, pattern, rate, layout, exit_layer, order, impatience, length, sampled)


@nightly
@ANY
@settings(max_examples=300, deadline=None)
@seed(SEED)
def test_many_hit_patterns_orders_and_stragglers(
    bench, pattern, rate, layout, exit_layer, order, impatience, length, sampled
):
    check_any(bench, pattern, rate, layout, exit_layer, order, impatience, length, sampled)


def check_any(bench, pattern, rate, layout, exit_layer, order, impatience, length, sampled):
    """Late candidates, late entries and unlucky orders cost passes, never a token."""
    params = SamplingParams(max_new_tokens=length, temperature=0.8 * sampled, seed=5, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[pattern % len(PROMPTS)])
    expected = bench.ordinary(prompt, params)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size, pattern)
    k, workers = layout
    got = bench.pipelined(prompt, params, k, exit_layer, head, order, impatience, workers=workers)
    agree(got, expected, k, workers)
    early = bench.info.num_layers - exit_layer
    assert got.main.layer_passes == bench.info.num_layers * length - early * got.hits
    assert got.main.stage.layer_passes == got.main.layer_passes + got.main.recomputed_layer_passes
    for sub in got.subs:
        assert sub.layer_passes <= early * math.ceil(k / workers) * (length - 1)
        assert sub.stage.layer_passes == sub.layer_passes + sub.coherence_layer_passes


@pytest.mark.parametrize(
    ("k", "workers", "lost"), [(3, 3, (1,)), (3, 3, (2, 3)), (3, 3, (1, 2, 3)), (4, 2, (1,)), (4, 2, (2,))]
)
def test_lost_sub_processes_cost_no_token(bench, k, workers, lost):
    prompt = bench.prompt_ids(PROMPTS[4])
    expected = bench.ordinary(prompt, GREEDY)
    head = rehearsed(prompt, expected.tokens, 1.0, bench.info.vocab_size)
    got = bench.pipelined(prompt, GREEDY, k, 3, head, lost=lost, workers=workers)
    agree(got, expected, k, workers)
    assert (got.hits == 0) == (len(lost) == workers)
    assert got.hits < len(got.tokens) - 1


def test_a_late_sub_process_gets_another_chance():
    """It names every token and hangs until position 10: not waited for after three times, until position 32."""
    begin = begin_message([0], SamplingParams(max_new_tokens=100))
    told = []
    stage = VirtualStage(Clock(1.0, 1.0, 0.0, random.Random(0)), 4)
    main = MainProcess(stage, 2, (1,), lambda addresses, message: told.append((addresses, message)), begin)
    machine = main.decode(VirtualSampler(GREEDY), StopRule(SamplingParams(max_new_tokens=100), frozenset(), None))
    waits, named, reply = [], 0, None
    with contextlib.suppress(StopIteration):
        while True:
            wanted = next_wait(machine, reply)
            position, reply = len(main.history) - 1, None
            if position != named:
                named, reply = position, Candidate(1, begin.request, position, (position,))
            elif wanted.patience and position not in waits:
                waits.append(position)
                if position > 10:
                    reply = HeadStart(1, begin.request, position, (position,), torch.zeros(1, 1, 1))
    winners = [message.winner for addresses, message in told if addresses == (CLIENT,) and isinstance(message, Token)]
    assert waits == [1, 2, 3, *range(32, 100)]
    assert winners == [MISS] * 31 + [1] * 68 + [NOT_ASKED]


def test_an_exit_state_that_comes_again_starts_its_candidates_anew():
    """From a new main process that goes over the same text, or doubled on its way."""
    begin, clock, sent = begin_message([0], GREEDY), Clock(1.0, 1.0, 0.0, random.Random(0)), []
    head, stage = VirtualExitHead(clock, 0.0, [1] * 14), VirtualStage(clock, 2)
    sub = SubProcess(stage, head, 1, (1,), 1, lambda addresses, message: sent.append(message), begin)
    machine, state = sub.serve(), ExitState(DECIDER, begin.request, 0, torch.zeros(1, 1, 0))
    next_wait(machine, None)
    for message in (state, None, state, None, Token(DECIDER, begin.request, 1, 1, 1), None):
        next_wait(machine, message)
    assert [type(message) for message in sent] == [Candidate, HeadStart, Candidate, HeadStart, Entries]
    assert stage.length(0) == 2


class CountingHead(VirtualExitHead):
    """Notes the position of each ranking."""

    asked: list[int]

    def candidates(self, hidden, history, k):
        self.asked.append(len(history))
        return super().candidates(hidden, history, k)


@pytest.mark.parametrize("right", [True, False])
def test_candidates_are_ranked_before_the_main_process_asks(right):
    """Those behind the likeliest early start, once the main process is known to ask for such; used if it was right."""
    begin, clock, sent = begin_message([0], GREEDY), Clock(1.0, 1.0, 0.0, random.Random(0)), []
    head, stage, state = CountingHead(clock, 0.0, [1] * 14), VirtualStage(clock, 2), torch.zeros(1, 1, 0)
    head.asked = []
    sub = SubProcess(stage, head, 1, (1,), 1, lambda _, message: sent.append(message), begin, ranks_ahead=True)
    machine = sub.serve()
    next_wait(machine, None)

    def say(message):
        wanted = next_wait(machine, message)
        while wanted.patience == 0:
            wanted = next_wait(machine, None)

    say(ExitState(DECIDER, begin.request, 0, state))
    assert head.asked == [1]
    say(Token(DECIDER, begin.request, 1, 1, 1, state))
    assert head.asked == [1, 2, 3]
    token, winner = (2, 1) if right else (7, MISS)
    say(Token(DECIDER, begin.request, 2, token, winner, state if right else None))
    assert head.asked == ([1, 2, 3, 4] if right else [1, 2, 3])
    if not right:
        say(ExitState(DECIDER, begin.request, 2, state))
        assert head.asked == [1, 2, 3, 3, 4]
    named = [message.position for message in sent if isinstance(message, Candidate)]
    assert named == [1, 2, 3]
    assert stage.length(0) == 4
