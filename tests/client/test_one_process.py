"""A staged layout whose last stage decodes a request alone, since the other stages have nothing to save."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from chaos import Fate, chaos
from seeds import SEED

import ppd_runtime.launch.startup
from ppd_runtime import PPDRuntime

PROMPT = [5, 9, 200, 31]
LAYOUT = {"stages": 3, "transport": "local", "dtype": "float32"}
ONE_IS_QUICKER, STAGES_ARE_QUICKER = (0.01, 0.01, 0.01, 0.001), (0.01, 0.01, 0.001, 0.01)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 3}, {"logprobs": 2}])
def test_its_tokens_are_ordinary_decodings(folder, ordinary, one_process, settings):
    one_process(ONE_IS_QUICKER)
    with PPDRuntime(folder, trace=True, **LAYOUT) as runtime:
        for tokens in (1, 40):
            result = runtime.generate(PROMPT, max_new_tokens=tokens, **settings)
            expected = ordinary.generate(PROMPT, max_new_tokens=tokens, **settings)
            assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)
            assert result.stats.one_process
            assert (result.stats.sub_layer_passes, result.stats.first_boundary) == ((), ())
            assert result.stats.main_layer_passes == 4 * len(result.token_ids)
            assert result.stats.predicted_ratio == 1.0
            assert {process.rank for process in result.trace.processes} == {0}


def test_stages_that_save_time_are_used(folder, ordinary, one_process):
    one_process(STAGES_ARE_QUICKER)
    with PPDRuntime(folder, **LAYOUT) as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=40)
        assert result.token_ids == ordinary.generate(PROMPT, max_new_tokens=40).token_ids
        assert not result.stats.one_process
        assert result.stats.first_boundary


@pytest.mark.parametrize("speculation", ["always", "never"])
def test_a_fixed_way_is_the_stages(folder, one_process, speculation):
    one_process(ONE_IS_QUICKER)
    with PPDRuntime(folder, speculation=speculation, **LAYOUT) as runtime:
        assert not runtime.generate(PROMPT, max_new_tokens=5).stats.one_process


def test_long_prompts_are_the_stages(folder, ordinary, one_process):
    one_process(ONE_IS_QUICKER)
    prompt = PROMPT * 75
    with PPDRuntime(folder, **LAYOUT) as runtime:
        result = runtime.generate(prompt, max_new_tokens=5)
    assert not result.stats.one_process
    assert result.token_ids == ordinary.generate(prompt, max_new_tokens=5).token_ids


def test_a_request_beside_another_is_the_stages(folder, ordinary, one_process):
    one_process(ONE_IS_QUICKER)
    expected = ordinary.generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids
    with PPDRuntime(folder, max_requests=2, **LAYOUT) as runtime:
        first = runtime.stream(PROMPT, max_new_tokens=60, ignore_eos=True)
        begun = [next(first)]
        second = runtime.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        rest = [*begun, *first]
        assert second.token_ids == tuple(event.token_id for event in rest) == expected
        third = runtime.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert [first.result.stats.one_process, second.stats.one_process] == [True, False]
    assert third.stats.one_process


def test_a_request_that_ends_early_leaves_the_process_free(folder, ordinary, one_process):
    one_process(ONE_IS_QUICKER)
    with PPDRuntime(folder, **LAYOUT) as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=500, ignore_eos=True)
        next(stream)
        stream.close()
        result = runtime.generate(PROMPT, max_new_tokens=9)
        assert result.stats.one_process
        assert result.token_ids == ordinary.generate(PROMPT, max_new_tokens=9).token_ids


MISHAPS = {
    "lost": 0.02,
    "doubled": 0.1,
    "stale": 0.1,
    "cut": 0.02,
    "death": 0.001,
    "main_death": 0.001,
    "stopped": 0.002,
}


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        pytest.param(stages, kind, marks=() if i % 2 == (stages == 1) or kind == "death" else pytest.mark.nightly)
        for stages in (1, 3)
        for i, kind in enumerate(MISHAPS)
        if (stages, kind) != (1, "death")
    ],
)
def test_whatever_becomes_of_messages_and_workers(folder, ordinary, one_process, hurried, monkeypatch, stages, kind):
    """By a last stage alone, and by a single stage."""
    one_process(ONE_IS_QUICKER)
    fate, draw = Fate(SEED, **{kind: MISHAPS[kind]}), random.Random(SEED)
    monkeypatch.setattr(ppd_runtime.launch.startup, "LocalWorkers", chaos(fate))
    jobs = [(PROMPT[: draw.randint(1, 4)], draw.randint(1, 40), draw.choice([0.0, 0.8])) for _ in range(8)]

    def generate(generator, job):
        prompt, tokens, temperature = job
        settings = {"temperature": temperature, "seed": 3, "ignore_eos": True}
        return generator.generate(prompt, max_new_tokens=tokens, **settings)

    expected = [generate(ordinary, job).token_ids for job in jobs]
    in_one_process = 0
    settings = LAYOUT | {"stages": stages, "max_restarts": 10_000, "max_requests": 2}
    with PPDRuntime(folder, **settings) as runtime, ThreadPoolExecutor(2) as pool:
        while not (fate.happened[kind] and in_one_process):
            alone = [generate(runtime, job) for job in jobs]
            assert [result.token_ids for result in alone] == expected
            assert [result.token_ids for result in pool.map(lambda job: generate(runtime, job), jobs)] == expected
            in_one_process += sum(stages == 1 or result.stats.one_process for result in alone)
