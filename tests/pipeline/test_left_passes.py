"""A pass of rows that a decision has dropped is left between two layers, and what is held stays coherent."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_for_tests import FAMILIES
from pipeline_runs import PROMPTS, Bench, begin_message

from ppd_runtime.models.stage import tree_range
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import ModelHead
from ppd_runtime.pipeline.messages import MISS, Message, Rows, Token
from ppd_runtime.pipeline.ports import Machine, WaitFor
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.ports import RowsPass
from ppd_runtime.pipeline.staged.tree import MOST_HELD
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import DECIDER

GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(autouse=True)
def looks_behind_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time they take here."""
    monkeypatch.setattr(tree_range, "_BETWEEN_LOOKS_S", 0.0)


def next_pass(machine: Machine, reply: Any = None) -> Any:
    """What it asks for next, but for what is no pass: its heads are computed, and it waits for nothing."""
    awaited = machine.send(reply)
    while not isinstance(awaited, RowsPass):
        awaited = machine.send(None if isinstance(awaited, WaitFor) else awaited.alone())
    return awaited


def test_a_pass_is_left_once_its_rows_are_dropped(model_folder):
    bench, sent = Bench.of(model_folder("llama", num_layers=4)), list[Message]()
    prompt = bench.prompt_ids(PROMPTS[3])
    stage = TreeRange(bench.stage(3), MOST_HELD)
    head = ModelHead(stage._stage, Sampler(GREEDY, len(prompt)))
    begin = begin_message(prompt, GREEDY)
    first = FirstStage(stage, head, 2, 2, 2, lambda _, message: sent.append(message), begin)
    machine = first.serve()
    guessed = next_pass(machine)
    assert guessed.layers == range(1) and len(guessed.paths) == 2
    wrong = {node.token for node in first.tree.alive()}
    token = next(number for number in range(3, 300) if number not in wrong)

    assert isinstance(machine.send(guessed.alone()), WaitFor), "it looks behind the first layer"
    certain = next_pass(machine, Token(DECIDER, begin.request, len(prompt), token, MISS))
    assert certain.layers == range(3), "a pass of a certain token runs through"
    assert not any(isinstance(message, Rows) for message in sent), "of the pass that was left nothing goes on"
    assert stage._slots._rows == {}, "its rows are free"

    ordinary = bench.stage()
    ordinary.begin(len(prompt) + 1)
    ordinary.run(0, 4, prompt, 0)
    assert certain.alone().equal(ordinary.run(0, 3, [token], len(prompt)))


def test_rows_that_may_still_come_true_go_on(model_folder):
    bench = Bench.of(model_folder("llama", num_layers=4))
    prompt = bench.prompt_ids(PROMPTS[3])
    stage = TreeRange(bench.stage(3), MOST_HELD)
    begin = begin_message(prompt, GREEDY)
    head = ModelHead(stage._stage, Sampler(GREEDY, len(prompt)))
    first = FirstStage(stage, head, 2, 2, 2, lambda *_: None, begin, repetitions=False)
    machine = first.serve()
    guessed = next_pass(machine)
    token, _ = guessed.inputs
    assert isinstance(machine.send(guessed.alone()), WaitFor)
    rest = next_pass(machine, Token(DECIDER, begin.request, len(prompt), token, MISS))
    assert rest.layers == range(1, 3) and len(rest.paths) == 1, "of two siblings one has come true"
    ordinary = bench.stage()
    ordinary.begin(len(prompt) + 1)
    ordinary.run(0, 4, prompt, 0)
    assert rest.alone().equal(ordinary.run(0, 3, [token], len(prompt)))


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers that each part of a pass began with."""
    parts: list[int] = []
    alone = RowsPass.alone

    def noted(self: RowsPass) -> torch.Tensor:
        parts.append(self.layers.start)
        return alone(self)

    monkeypatch.setattr(RowsPass, "alone", noted)
    return parts


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_bits_are_ordinary_decodings(model_folder, left, family):
    bench = Bench.of(model_folder(family, num_layers=4))
    prompt = bench.prompt_ids(PROMPTS[2])
    for seed, params in ((1, GREEDY), (2, SamplingParams(16, temperature=1.0, seed=3, ignore_eos=True))):
        ordinary = bench.ordinary(prompt, params)
        staged = bench.staged(prompt, params, (3,), 2, 4, seed=seed)
        assert staged.tokens == ordinary.tokens
        assert all(a.equal(b) for a, b in zip(staged.decisive, ordinary.decisive, strict=True))
    assert left.count(1) > left.count(2) > 0, "some passes are left"
