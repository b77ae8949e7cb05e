"""One fault at a time in the staged layout: what is lost, doubled or late costs time, never a token."""

import functools

import pytest
from grids import nightly, pairs_first
from pipeline_runs import PROMPTS, Bench
from staged_runs import StagedRun

from ppd_runtime.pipeline.messages import Begin, Guesses, Missing, PromptStates, Rows, Token
from ppd_runtime.sampling.params import SamplingParams

LAYOUTS = [((2,), 1, 1), ((1, 3), 3, 4)]
FAULTY = SamplingParams(max_new_tokens=10, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small model."""
    return Bench.of(model_folder("llama", num_layers=4))


def _run(bench, layout, seed=None):
    """A run, and what it should give."""
    return StagedRun(bench, bench.prompt_ids(PROMPTS[2]), FAULTY, *layout, seed=seed), _expected(bench)


@functools.cache
def _expected(bench):
    return bench.ordinary(bench.prompt_ids(PROMPTS[2]), FAULTY).tokens


@pytest.mark.parametrize(
    ("kind", "mishap", "layout"),
    pairs_first([Begin, PromptStates, Rows, Guesses, Token], ["lost", "doubled", "late"], LAYOUTS),
)
def test_a_message_that_meets_with_a_mishap_costs_time_only(bench, kind, mishap, layout):
    for number in (1, 2, 4, 7):
        run, expected = _run(bench, layout)
        held = []

        def strange(message, held=held):
            held.append(message)
            return {"lost": [], "doubled": [message, message], "late": []}[mishap]

        run.meddle(kind, number, strange)
        if mishap == "late":
            run.network.plan = {
                step: lambda run=run, held=held: [run.network.deliver(rank, held) for rank in (*run.others, 0)]
                for step in (60, 90)
            }  # at everybody's
        assert run.run() == expected


@pytest.mark.parametrize("every", [71, pytest.param(11, marks=nightly)])
@pytest.mark.parametrize("introduced", [True, False])
@pytest.mark.parametrize("layout", [*LAYOUTS, ((1, 2, 3), 2, 2)])
def test_a_new_life_of_a_stage_goes_on_with_the_same_text(bench, layout, introduced, every):
    """At other steps for each stage."""
    for rank in range(len(layout[0]) + 1):
        for step in range(2 + 11 * rank, 200, every):
            run, expected = _run(bench, layout, seed=step % 3 or None)
            run.network.plan[step] = lambda run=run, rank=rank: run.lose(rank, introduced)
            assert run.run() == expected


def test_an_earlier_life_of_the_last_stage_may_have_come_further(bench):
    for step in range(20, 150, 33):
        run, expected = _run(bench, LAYOUTS[1])

        def forget(run=run):
            """The client has got nothing, and does not know that the stage is a new one."""
            run.network.sent.clear()
            run.network.replace(0, run._last(run.begin))

        run.network.plan[step] = forget
        assert run.run() == expected


def test_a_beginning_that_comes_again_to_a_new_first_stage_changes_no_token(bench):
    """Its rows stand for the same paths as those before the restart, though it may choose others."""
    for step in range(15, 120, 21):
        run, expected = _run(bench, LAYOUTS[1], seed=step)

        def die(run=run):
            begins = [message for address, message in run.network.sent if address == 1 and isinstance(message, Begin)]
            run.lose(1, introduced=False)
            run.rows = 1
            run.network.deliver(1, begins)

        run.network.plan[step] = die
        assert run.run() == expected


def test_what_comes_late_of_an_attempt_before_begins_no_other(bench):
    run, expected = _run(bench, LAYOUTS[1])
    run.network.plan[30] = lambda: run.lose(2)
    for step in range(35, 200, 5):
        late = [Missing(rank, 1, 0, epoch) for rank in (1, 2) for epoch in (0, 1)]
        run.network.plan[step] = lambda late=late: run.network.deliver(0, late)
    assert run.run() == expected
    begins = {message.epoch for _, message in run.network.sent if isinstance(message, Begin)}
    assert len(begins) <= 3
