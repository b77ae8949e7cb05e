"""Prompts of several chunks on their way through the stages, and what may happen to them there."""

from dataclasses import replace

import pytest
from pipeline_runs import PROMPTS, Bench
from staged_runs import StagedRun

from ppd_runtime.models.stage import chunks
from ppd_runtime.pipeline.messages import Begin, Cancel, Peers, PromptStates
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER

CHUNK = 4
CUTS = (1, 3)
FAULTY = SamplingParams(max_new_tokens=6, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def bench(model_folder):
    """A small model."""
    return Bench.of(model_folder("llama", num_layers=4))


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))


@pytest.fixture
def expected(bench):
    """The text."""
    return bench.ordinary(bench.prompt_ids(PROMPTS[3]), FAULTY).tokens


def _run(bench, seed=None):
    return StagedRun(bench, bench.prompt_ids(PROMPTS[3]), FAULTY, CUTS, k=2, rows=2, seed=seed)


def _borders(run):
    return list(range(0, len(run.begin.prompt_ids), CHUNK))


def _sent(run, rank, epoch=1):
    """The positions of the chunks that a stage has sent in an attempt, and when."""
    places = enumerate(message for _, message in run.network.sent)
    return {
        message.position: place
        for place, message in places
        if isinstance(message, PromptStates) and (message.sender, message.epoch) == (rank, epoch)
    }


def test_stages_work_on_different_chunks_at_once(bench, expected):
    run = _run(bench)
    assert run.run() == expected
    first, second = _sent(run, 1), _sent(run, 2)
    borders = _borders(run)
    assert len(borders) >= 4
    assert list(first) == list(second) == borders
    assert all(second[border] < first[later] for border, later in zip(borders, borders[2:], strict=False))


@pytest.mark.parametrize("mishap", ["lost", "doubled", "late", "another's borders", "cut short"])
def test_a_chunk_that_meets_with_a_mishap_costs_time_only(bench, expected, mishap):
    for number in range(0, 2 * len(_borders(_run(bench))), 4 if mishap in ("lost", "late") else 5):
        run, held = _run(bench, seed=number % 3 or None), []

        def strange(message, held=held):
            held.append(message)
            shifted, short = (
                replace(message, position=message.position + 1),
                replace(message, hidden=message.hidden[:, :1]),
            )
            changed = {"doubled": [message, message], "another's borders": [shifted], "cut short": [short]}
            return changed.get(mishap, [])

        run.meddle(PromptStates, number, strange)
        if mishap == "late":
            later = {
                step: lambda run=run, held=held: [run.network.deliver(to, held) for to in (2, DECIDER)]
                for step in (9, 40)
            }
            run.network.plan = later
        assert run.run() == expected


@pytest.mark.parametrize(("rank", "introduced"), [(DECIDER, True), (1, True), (1, False), (2, False)])
def test_a_stage_that_is_lost_within_the_prompt_begins_it_anew(bench, expected, rank, introduced):
    lost_within = 0
    for step in range(2, 32, 6):
        run = _run(bench, seed=step % 4 or None)

        def die(run=run):
            nonlocal lost_within
            lost_within += len(_sent(run, 1)) > 0 and len(_sent(run, 2)) < len(_borders(run))
            run.lose(rank, introduced)

        run.network.plan[step] = die
        assert run.run() == expected
    assert lost_within >= 2


def test_an_attempt_that_is_over_ends_between_two_chunks(bench, expected):
    cut_short = 0
    for seed in range(1, 6):
        run = _run(bench, seed)
        run.network.plan[6] = lambda run=run: run.network.deliver(DECIDER, [Peers(CLIENT, 0, [2], [""])])
        assert run.run() == expected
        cut_short += 0 < len(_sent(run, 1)) < len(_borders(run))
        assert list(_sent(run, 1, epoch=2)) == _borders(run)
    assert cut_short >= 2


def test_a_request_may_be_cancelled_within_the_prompt(bench):
    for seed in range(1, 6):
        run = _run(bench, seed)
        run.network.plan[6] = lambda run=run: run.network.deliver(DECIDER, [Cancel(CLIENT, 1)])
        assert run.run() == []
        assert len(_sent(run, 2)) < len(_borders(run))


def test_chunks_that_overtake_their_attempts_beginning_are_kept(bench, expected):
    for number in range(6):
        run, held = _run(bench), []
        run.meddle(Begin, number, lambda message, held=held: held.append(message) or [])
        run.network.plan[12] = lambda run=run, held=held: [run.network.deliver(rank, held) for rank in run.others]
        assert run.run() == expected
