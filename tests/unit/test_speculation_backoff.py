"""Sub-processes that are never right are left alone; whenever that is, tokens stay ordinary decoding's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import PROMPTS, Bench, rehearsed

from ppd_runtime.pipeline.messages import CLIENT, CatchUp, ExitState, Token
from ppd_runtime.pipeline.speculation_backoff import SpeculationBackoff
from ppd_runtime.sampling_params import SamplingParams

DEPTH, EXIT = 6, 3


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small Llama of even depth."""
    return Bench.of(model_folder("llama", num_layers=DEPTH))


def restful(verdicts: str, backoff: SpeculationBackoff) -> str:
    """What a rest says at each token: `r` where it is in one."""
    said = ""
    for verdict in verdicts:
        backoff.note(verdict == "+")
        said += "r" if backoff.now else "."
    return said


def test_rests_follow_misses_and_grow():
    assert restful("-" * 23 + "+" + "-" * 24, SpeculationBackoff()) == "." * 47 + "r"
    assert restful("-" * 28, SpeculationBackoff(3, 2, 4, 8)) == "..rrrr..rrrrrrrr..rrrrrrrr.."


def test_a_hit_ends_the_account():
    backoff = SpeculationBackoff(3, 2, 4, 8)
    assert restful("-------+--", backoff) == "..rrrr...."
    assert restful("-", backoff) == "r"


def test_a_new_request_is_a_new_trial():
    backoff = SpeculationBackoff(3, 2, 4, 8)
    assert restful("----", backoff) == "..rr"
    backoff.begin()
    assert restful("--", backoff) == ".r"


@pytest.mark.parametrize(("k", "run_ahead"), [(1, True), (1, False), (3, False)])
def test_nobody_works_during_a_rest(bench, k, run_ahead):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[3])
    expected = bench.ordinary(prompt, params)
    wrong = rehearsed(prompt, expected.tokens, 0.0, bench.info.vocab_size)
    got = bench.pipelined(prompt, params, k, EXIT, wrong, run_ahead=run_ahead, backoff=SpeculationBackoff(4, 2, 8, 16))
    assert got.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.decisive, expected.decisive, strict=True))
    said = [(to, m) for to, m in got.network.sent if to != CLIENT]
    missed = [m for to, m in said if isinstance(m, CatchUp) and to == 1]
    told = [m.position - len(prompt) for to, m in said if isinstance(m, Token) and to == 1]
    assert told == [0, 1, 2, 12, 30]
    assert [(m.position - len(prompt), len(m.token_ids), len(m.entries)) for m in missed] == [(3, 9, 8), (13, 17, 16)]
    if not run_ahead:
        asked = [m.position + 1 - len(prompt) for to, m in said if isinstance(m, ExitState) and to == 1]
        assert asked == [0, 1, 2, 3, 12, 13, 30, 31]
    for sub in got.subs:
        assert sub.coherence_layer_passes == EXIT * (1 + len(told) + len(missed)), (
            "the prompt, and what no entries came for"
        )
    assert got.main.layer_passes == DEPTH * 40
    assert got.main.recomputed_layer_passes == 0
    cuts = 0 if run_ahead else len(asked)
    assert sorted(got.main.stage.ranges) == sorted([(0, EXIT), (EXIT, DEPTH)] * cuts + [(0, DEPTH)] * (40 - cuts)), (
        "a pass is in two parts where its exit state is sent alone"
    )


@given(
    pattern=st.integers(0, 2**32 - 1),
    rate=st.sampled_from([0.1, 0.3, 0.6]),
    layout=st.sampled_from([(1, 1, True), (1, 1, False), (3, 3, False), (3, 2, False)]),
    order=st.none() | st.integers(0, 2**32 - 1),
    impatience=st.sampled_from([0.0, 0.05, 0.3]),
    length=st.integers(1, 40),
    numbers=st.tuples(st.integers(2, 5), st.integers(2, 3), st.integers(1, 6)),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_pattern_any_order_any_rest(bench, pattern, rate, layout, order, impatience, length, numbers):
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[pattern % len(PROMPTS)])
    expected = bench.ordinary(prompt, params)
    head = rehearsed(prompt, expected.tokens, rate, bench.info.vocab_size, pattern)
    k, workers, run_ahead = layout
    backoff = SpeculationBackoff(*numbers, longest=12)
    got = bench.pipelined(
        prompt, params, k, EXIT, head, order, impatience, workers=workers, run_ahead=run_ahead, backoff=backoff
    )
    assert got.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.decisive, expected.decisive, strict=True)) or workers < k
    assert got.main.layer_passes == DEPTH * length - EXIT * got.hits
