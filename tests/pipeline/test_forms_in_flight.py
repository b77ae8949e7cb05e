"""Texts that have to look like something, in the state machines: those of ordinary decoding with the same masks."""

import json

import pytest
from grids import pairs_first
from machine_network import MachineNetwork
from models_for_tests import END_ID
from pipeline_runs import PROMPTS, Bench, begin_message, same
from staged_runs import StagedRun

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import Token
from ppd_runtime.pipeline.speculation_policy import Always, Guessing
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER

SCHEMA = {
    "type": "object",
    "properties": {
        "the fox": {"enum": ["jumps over the dog", "waits"]},
        "layers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["the fox", "layers"],
    "additionalProperties": False,
}
FORMS = {
    "schema": {"schema": SCHEMA},
    "regex": {"regex": "(the (quick )?(fox|dog), ){2}and the token\\."},
    "choice": {"choice": ["the next token waits", "the next layer waits", "the end"]},
}
SETTINGS = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 4}, "penalised": {"repetition_penalty": 1.4}}
LAYOUTS = {"two": ((2,), 1, 1), "three": ((1, 3), 3, 4)}


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small model."""
    return Bench.of(model_folder("llama", num_layers=4))


def asked(form, settings, most=26):
    return SamplingParams(most, eos_token_ids=(END_ID,), **FORMS[form], **SETTINGS[settings])


def fits(bench, form, tokens, reason):
    """Whether a whole text is one that its form means, by other means than a grammar."""
    text = bench.text(tokens)
    if reason == "length":
        return True
    if form == "schema":
        found = json.loads(text)
        return set(found) == {"the fox", "layers"} and all(0 <= number <= 99 for number in found["layers"])
    return text in FORMS["choice"]["choice"] if form == "choice" else text.endswith("and the token.")


@pytest.mark.parametrize(("form", "settings", "seed"), pairs_first([*FORMS], [*SETTINGS], [None, 0, 1, 2]))
def test_both_layouts_give_ordinary_decodings_text(bench, form, settings, seed):
    params, prompt = asked(form, settings), bench.prompt_ids(PROMPTS[2])
    expected = bench.ordinary(prompt, params)
    assert fits(bench, form, expected.tokens, expected.reason)
    assert expected.reason == "eos" or len(expected.tokens) == 26
    impatience = 0.0 if seed is None else 0.1
    for k, exit_layer, run_ahead in ((1, 2, True), (3, 2, False), (2, 3, False)):
        same(bench.pipelined(prompt, params, k, exit_layer, None, seed, impatience, run_ahead=run_ahead), expected)
    for cuts, k, rows in LAYOUTS.values():
        guessing = Guessing(seed if seed is not None else 2)
        got = bench.staged(prompt, params, cuts, k, rows, seed, impatience, policy=Always(guessing))
        assert (got.tokens, got.reason) == (expected.tokens, expected.reason)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_that_is_lost_costs_time_only(bench, layout, settings):
    params, prompt = asked("schema", settings), bench.prompt_ids(PROMPTS[2])
    expected = bench.ordinary(prompt, params).tokens
    for rank in range(len(LAYOUTS[layout][0]) + 1):
        run = StagedRun(bench, prompt, params, *LAYOUTS[layout], seed=rank)
        run.network.plan[40 + 30 * rank] = lambda run=run, rank=rank: run.lose(rank)
        assert run.run() == expected


@pytest.mark.parametrize("lost", [(1,), (2, 3)])
def test_sub_processes_that_are_lost_cost_time_only(bench, lost):
    params, prompt = asked("schema", "sampled"), bench.prompt_ids(PROMPTS[1])
    expected = bench.ordinary(prompt, params)
    same(bench.pipelined(prompt, params, 3, 2, lost=lost), expected)


@pytest.mark.parametrize("guessing", Guessing)
def test_what_has_to_follow_is_a_row_of_the_same_pass(bench, guessing):
    """One stage: of a form with one text, all tokens are rows, whatever is guessed besides."""
    text = "the quick brown fox jumps over the lazy dog"
    params = SamplingParams(60, eos_token_ids=(END_ID,), choice=[text])
    prompt = bench.prompt_ids(PROMPTS[0])
    expected = bench.ordinary(prompt, params)
    assert bench.text(expected.tokens) == text
    network, stage, sampler = MachineNetwork(None), bench.stage(), bench.sampler(prompt, params)
    single = SingleStage(
        TreeRange(stage, MOST_HELD),
        8,
        network.send,
        begin_message(prompt, params),
        Always(guessing),
        repetitions=False,
        constraint=sampler.constraint,
    )
    network.add(DECIDER, single.decode(sampler, bench._stop(params)))
    network.run()
    told = [message for to, message in network.sent if to == CLIENT and isinstance(message, Token)]
    assert [message.token_id for message in told] == expected.tokens
    assert single.foreseen == single.asked == len(expected.tokens) - 1  # of the end nothing is asked
    assert sum(message.winner == 1 for message in told) >= len(expected.tokens) * 3 // 4


def test_a_grammar_that_leads_nowhere_ends_the_request(bench):
    prompt = bench.prompt_ids(PROMPTS[0])
    params = SamplingParams(20, eos_token_ids=(END_ID,), choice=["the dog"], num_generated=2)
    with pytest.raises(ValueError, match="^grammar: .* cannot be followed here: nothing may follow"):
        bench.ordinary(prompt, SamplingParams(20, eos_token_ids=(END_ID,), grammar="start: a\na: a"))
    with pytest.raises(RequestError, match="no token of the model's vocabulary continues the text"):
        bench.ordinary(prompt, params)  # what counts as generated is no text of the form
