"""Ways of guessing are compared by the clock, and whatever is guessed, tokens stay ordinary decoding's."""

import math
from collections import Counter

import pytest
import torch
from guessing_turns import TakesTurns
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import PROMPTS, Bench, rehearsed

from ppd_runtime.pipeline.messages import CatchUp, ExitState, Token
from ppd_runtime.pipeline.speculation_policy import Growth, Guessing, QuickestGuessing
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT

DEPTH, EXIT = 6, 3
NOTHING, REPETITIONS, EXITS = Guessing
WAYS = [NOTHING, REPETITIONS, EXITS]


class Decoding:
    """Decodes on a clock of its own, where a token takes what `seconds` says of the way it was guessed."""

    def __init__(self, ways, seconds, known=(), heavy_length=math.inf):
        self.now, self.seconds, self.heavy_length = 0.0, dict(seconds), heavy_length
        self.policy = QuickestGuessing(ways, known, heavy_length, lambda: self.now)
        self.policy.together(1)
        self.begin(0)

    def begin(self, prompt):
        """A request with so long a prompt, up to its first token."""
        self.length = prompt + 1
        self.policy.begin()
        self.policy.note(self.length)

    def tokens(self, number):
        """Decode so many; how many of them were guessed in each way, and the seconds that a token took."""
        began, counts = self.now, Counter()
        for _ in range(number):
            counts[self.policy.guessing] += 1
            self.length += 1
            self.now += self.seconds[self.policy.guessing] * (1 + self.length / self.heavy_length)
            self.policy.note(self.length)
        return counts, (self.now - began) / number


def test_guesses_that_cost_time_are_left():
    decoding = Decoding(WAYS, {NOTHING: 1.0, REPETITIONS: 1.0, EXITS: 1.3})
    assert decoding.tokens(64)[1] < 1.06
    counts, seconds = decoding.tokens(5000)
    assert seconds < 1.02
    assert counts[EXITS] > 10, "they are tried again from time to time"


def test_guesses_that_save_time_are_kept():
    decoding = Decoding(WAYS, {NOTHING: 1.0, REPETITIONS: 1.0, EXITS: 0.6})
    decoding.tokens(64)
    counts, seconds = decoding.tokens(5000)
    assert seconds < 0.62
    assert counts[EXITS] > 4700


def test_another_kind_of_text_is_noticed():
    decoding = Decoding(WAYS, {NOTHING: 1.0, REPETITIONS: 1.0, EXITS: 1.5})
    decoding.tokens(1000)
    decoding.seconds[EXITS] = 0.5
    assert decoding.tokens(1000)[1] < 0.85, "within so many tokens it has been tried again"
    decoding.seconds[EXITS] = 1.5
    assert decoding.tokens(200)[1] < 1.1, "a way in use is left as soon as it takes longer"


def test_what_is_known_is_where_it_begins():
    assert Decoding(WAYS, {}, (1.0, 0.9, 1.3)).policy.guessing == REPETITIONS
    decoding = Decoding(WAYS, {NOTHING: 1.0, REPETITIONS: 1.0, EXITS: 1.3}, (1.0, 0.0, 1.3))
    assert decoding.policy.guessing == NOTHING
    assert decoding.tokens(64)[0][EXITS] == 0
    assert decoding.policy.way_seconds(0) == pytest.approx((1.0, 1.0, 1.3, 0.0))


@pytest.mark.parametrize("known", [(), (4.0, 0.0, 1.5)], ids=["in this run", "in an earlier run"])
def test_a_way_that_was_timed_on_a_busy_machine_is_soon_tried_again(known):
    decoding = Decoding([NOTHING, EXITS], {NOTHING: 4.0, EXITS: 1.5}, known)
    decoding.tokens(20)
    decoding.seconds[NOTHING] = 1.0
    decoding.tokens(250)
    assert decoding.tokens(100)[1] < 1.1


def test_a_longer_text_is_no_slower_way():
    """Nothing was timed behind a long prompt, where everything takes three times as long."""
    decoding = Decoding([NOTHING, EXITS], {NOTHING: 1.0, EXITS: 1.2}, heavy_length=1000)
    decoding.begin(2000)
    decoding.tokens(200)
    decoding.begin(10)
    assert decoding.policy.guessing == NOTHING
    counts, _ = decoding.tokens(100)
    assert counts[EXITS] <= 10
    assert decoding.policy.way_seconds(0) == pytest.approx((1.0, 0.0, 1.2, 0.0))
    assert decoding.policy.way_seconds(2000) == pytest.approx((3.0, 0.0, 3.6, 0.0))


def test_growth_is_learned_from_texts_of_different_lengths():
    """A token takes twice as long behind 500 others, not behind 1,000 as was given."""
    growth = Growth(1000)
    for length in (100, 110, 120):
        growth.add(length, 1.0 + length / 500)
    assert growth.heavy_length == 1000, "lengths so much alike tell nothing"
    growth.add(800, 1.0 + 800 / 500)
    assert growth.heavy_length == pytest.approx(500)
    assert growth.moved(3.0, 1000, 0) == pytest.approx(1.0)
    growth.add(5000, 0.1)
    assert growth.heavy_length == 4000, "no nonsense"


def test_requests_at_once_have_a_comparison_of_their_own():
    decoding = Decoding(WAYS, {NOTHING: 1.0, REPETITIONS: 1.0, EXITS: 0.6})
    decoding.tokens(100)
    assert decoding.policy.guessing == EXITS
    decoding.policy.together(3)
    decoding.seconds[EXITS] = 2.0
    decoding.tokens(100)
    assert decoding.policy.guessing != EXITS
    decoding.policy.together(1)
    assert decoding.policy.guessing == EXITS
    assert decoding.policy.way_seconds(0)[EXITS] == pytest.approx(0.6)


class Requests(Decoding):
    """Requests of 64 tokens, one after another; a token of one process takes `of_one` seconds."""

    def __init__(self, seconds, of_one, known=()):
        super().__init__(WAYS, seconds, known)
        self.of_one = of_one

    def run(self, number, tokens=64):
        """Decode so many; how many of them one process decoded, and the seconds that a token took."""
        began, in_one_process = self.now, 0
        for _ in range(number):
            one = self.policy.one_process(tokens / 2)
            in_one_process += one is not None
            if one is None:
                self.begin(0)
                self.tokens(tokens)
            else:
                one.begin()
                for length in range(1, tokens + 2):
                    assert one.guessing == NOTHING
                    one.note(length)
                    self.now += self.of_one
        return in_one_process, (self.now - began) / number / tokens


def test_one_process_decodes_where_guesses_save_nothing():
    requests = Requests({NOTHING: 1.2, REPETITIONS: 1.25, EXITS: 1.3}, 1.0)
    assert requests.run(3)[0] == 0, "what guesses gain is a mean over texts"
    in_one_process, seconds = requests.run(100)
    assert 75 < in_one_process < 100, "the layout is tried again from time to time"
    assert seconds < 1.05
    assert requests.policy.way_seconds(0) == pytest.approx((1.2, 1.25, 1.3, 1.0), rel=0.02)


def test_the_layout_decodes_where_it_is_quicker():
    requests = Requests({NOTHING: 1.2, REPETITIONS: 0.92, EXITS: 1.3}, 1.0)
    assert requests.run(100)[0] < 20
    assert Requests({NOTHING: 1.2, REPETITIONS: 1.2, EXITS: 0.6}, 1.0).run(100)[0] == 0, "then it is not even tried"


def test_what_is_known_of_one_process_is_used_from_the_first_request():
    seconds = {NOTHING: 1.2, REPETITIONS: 1.25, EXITS: 1.3}
    assert Requests(seconds, 1.0, (1.2, 1.25, 1.3, 1.0)).run(5)[0] == 5
    assert Requests(seconds, 2.0, (1.2, 1.25, 1.3, 2.0)).run(5)[0] == 0


def test_one_process_is_for_requests_that_begin_alone():
    requests = Requests({NOTHING: 1.2, REPETITIONS: 1.25, EXITS: 1.3}, 1.0, (1.2, 1.25, 1.3, 1.0))
    one = requests.policy.one_process(10)
    requests.policy.together(2)
    assert requests.policy.one_process(10) is None
    for length in range(100):
        one.note(length)
        requests.now += 7.0
    assert requests.policy.way_seconds(0)[-1] == 1.0, "what two take together is not what one takes"


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama of even depth."""
    return Bench.of(model_folder("llama", num_layers=DEPTH))


@pytest.mark.parametrize(("k", "run_ahead"), [(1, True), (1, False), (3, False)])
def test_nobody_works_while_nothing_is_guessed(bench, k, run_ahead):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(prompt, params)
    wrong = rehearsed(prompt, expected.tokens, 0.0, bench.info.vocab_size)
    got = bench.pipelined(prompt, params, k, EXIT, wrong, run_ahead=run_ahead, policy=TakesTurns(4, 10))
    assert got.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.decisive, expected.decisive, strict=True))
    said = [(to, m) for to, m in got.network.sent if to != CLIENT]
    missed = [m for to, m in said if isinstance(m, CatchUp) and to == 1]
    told = [m.position - len(prompt) for to, m in said if isinstance(m, Token) and to == 1]
    assert told == [0, 1, 2, 14, 15, 16, 28, 29, 30]
    caught_up = [(m.position - len(prompt), len(m.token_ids), len(m.entries)) for m in missed]
    assert caught_up == [(3, 11, 10), (17, 11, 10)]
    if not run_ahead:
        asked = [m.position + 1 - len(prompt) for to, m in said if isinstance(m, ExitState) and to == 1]
        assert asked == [0, 1, 2, 3, 14, 15, 16, 17, 28, 29, 30, 31]
    for sub in got.subs:
        assert sub.coherence_layer_passes == EXIT * (1 + len(told) + len(missed)), (
            "the prompt, and what no entries came for"
        )
    assert got.main.layer_passes == DEPTH * 40
    assert got.main.recomputed_layer_passes == 0
    assert len(got.main.asked) == 12
    assert not got.main.foreseen
    cuts = 0 if run_ahead else len(asked)
    assert sorted(got.main.stage.ranges) == sorted([(0, EXIT), (EXIT, DEPTH)] * cuts + [(0, DEPTH)] * (40 - cuts)), (
        "a pass is in two parts where its exit state is sent alone"
    )


@given(
    pattern=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([0.1, 0.3, 0.6, 1.0]),
    layout=st.sampled_from([(1, 1, True), (1, 1, False), (3, 3, False), (3, 2, False)]),
    order=st.none() | st.integers(0, 2**32 - 1),
    impatience=st.sampled_from([0.0, 0.05, 0.3]),
    length=st.integers(1, 30),
    turns=st.tuples(st.integers(1, 5), st.integers(1, 8)),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_pattern_any_order_any_turns(bench, pattern, rate, layout, order, impatience, length, turns):
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[pattern % len(PROMPTS)])
    expected = bench.ordinary(prompt, params)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size, pattern)
    k, workers, run_ahead = layout
    got = bench.pipelined(
        prompt,
        params,
        k,
        EXIT,
        head,
        order,
        impatience,
        workers=workers,
        run_ahead=run_ahead,
        policy=TakesTurns(*turns),
    )
    assert got.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.decisive, expected.decisive, strict=True)) or workers < k
    assert got.main.layer_passes == DEPTH * length - EXIT * got.hits
    assert got.hits <= len(got.main.foreseen) <= len(got.main.asked)
