"""Choices and guesses in the head's recording, on a GPU that is a stand-in: those of launched passes and of a CPU."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_operators import CapturedOperators
from models_for_tests import load_stage
from torch import Tensor
from two_gpus import TwoGpus, two_gpus

from ppd_runtime.models.stage.graphs import Recordings
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.rows_range import RowsRange
from ppd_runtime.models.trained.exit_heads import ModelHead, ShortlistSampler, TrainedHead
from ppd_runtime.models.trained.heads import KINDS, new_head
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.gpu_choice import UnreadLogits
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler, TimedSampler
from ppd_runtime.tracing.spans import Kind

ModelFolder = Callable[..., Path]
Both = tuple[RowsRange, RowsRange]
VOCAB = 320
CHOOSING = ({"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 200})
GUESSING = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoGpus]:
    monkeypatch.setattr("ppd_runtime.models.stage.rows_range.attends_to_slots", lambda model: True)
    # a stand-in's numbers lie on the CPU, where native code ranks them; a GPU's never do
    monkeypatch.setattr("ppd_runtime.models.trained.exit_heads.is_loaded", lambda: False)
    with two_gpus() as both, CapturedOperators(both):
        yield both


@pytest.fixture
def both(gpus: TwoGpus, model_folder: ModelFolder) -> Both:
    """A stage whose passes are recorded, and one whose passes are launched."""
    folder = model_folder("llama", num_layers=2, vocab_size=VOCAB)
    recorded, launched = (RowsRange(load_stage(folder).model) for _ in range(2))
    recorded._recordings = Recordings()
    return recorded, launched


def states_of(rows: int, size: int, seed: int = 0) -> Tensor:
    """`[1, rows, size]` states."""
    return torch.randn(1, rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("params", CHOOSING, ids=str)
def test_one_replay_chooses(gpus: TwoGpus, both: Both, params: dict[str, Any]) -> None:
    """The CPU's choice, to the last bit; filters may have to see the logits."""
    recorded, launched = both
    sampler, alone = Sampler(SamplingParams(**({"temperature": 1.0, "seed": 3} | params))), 0
    for position in range(1, 13):
        hidden, history = states_of(3, recorded.state_size, position), [7] * position
        before, unread = gpus.replays, recorded.unread_logits(hidden)
        assert isinstance(unread, UnreadLogits) and gpus.replays == before
        assert sampler.choose(unread, history) == sampler.choose(launched.logits(hidden), history)
        alone += gpus.replays - before == 1
    filters = {"top_p", "top_k"} & {*params}
    assert alone > 5 if filters else alone == 11, "the first pass tries its recording"
    assert filters or len(gpus.graphs) == 1


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}], ids=str)
def test_heads_and_choices_count_once(both: Both, params: dict[str, Any]) -> None:
    """A choice's span begins behind that of the head that was computed for it."""
    stage = both[0]
    sampler, recorder = TimedSampler(SamplingParams(**params), stage.recorder), stage.recorder
    recorder.begin(traced=True)
    sampler.choose(stage.unread_logits(states_of(1, stage.state_size)), [7])
    ModelHead(stage, sampler).candidates(states_of(1, stage.state_size), [7], 2)
    noted = recorder.spans(0)
    assert noted and [span.kind for span in noted.spans] == [Kind.HEAD, Kind.CHOOSE] * 2
    assert all(before.ended_ns <= behind.began_ns for before, behind in pairwise(noted.spans))


def test_a_choice_in_doubt_is_asked_for_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, launched = both
    hidden, sampler = states_of(1, recorded.state_size), Sampler(SamplingParams(temperature=1.0, top_p=1e-6))
    expected = sampler.choose(launched.logits(hidden), [7])
    asked, choice = list[int](), sampler._there.choice
    monkeypatch.setattr(sampler._there, "choice", lambda *given: asked.append(1) or choice(*given))
    assert sampler.choose(recorded.unread_logits(hidden), [7]) == expected
    assert asked == [1]


def test_what_cannot_be_chosen_there_is_read(both: Both) -> None:
    recorded, launched = both
    hidden = states_of(1, recorded.state_size)
    for params in ({"logprobs": 2}, {"repetition_penalty": 1.5}, {"top_k": 9, "top_p": 0.5, "temperature": 1.0}):
        chosen, expected = (Sampler(SamplingParams(seed=3, **params), 1) for _ in range(2))
        assert chosen.choose(recorded.unread_logits(hidden), [7]) == expected.choose(launched.logits(hidden), [7])
        assert chosen.take_logprobs() == expected.take_logprobs()
    with pytest.raises(RequestError):
        Sampler(SamplingParams()).choose(recorded.unread_logits(hidden * torch.nan), [7])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_replay_guesses(gpus: TwoGpus, both: Both, temperature: float) -> None:
    recorded, launched = (ModelHead(stage, Sampler(SamplingParams(seed=3, temperature=temperature))) for stage in both)
    for several in (1, 2, ROWS):
        texts, states = [[n] * n for n in range(several)], states_of(several, both[0].state_size, several)
        expected = launched.guesses(states, texts, 3)
        before = gpus.replays
        assert recorded.guesses(states, texts, 3) == expected
        assert gpus.replays - before == 1 + (several == 1), "the first one tries its recording"
        assert recorded.candidates(states, [1, 2], 3) == launched.candidates(states, [1, 2], 3)
    assert len(gpus.graphs) == 1
    texts, states = [[1]] * (ROWS + 2), states_of(ROWS + 2, both[0].state_size)
    assert recorded.guesses(states, texts, 3) == launched.guesses(states, texts, 3), "more rows than a pass has"


def test_requests_take_turns_at_a_head(both: Both) -> None:
    """At other temperatures, each with its own seed."""
    samplers = [Sampler(SamplingParams(seed=seed, temperature=0.8 * (seed % 3))) for seed in range(6)]
    for turn in range(1, 4):
        states, texts = states_of(2, both[0].state_size, turn), [[1] * turn, [2] * 3 * turn]
        for sampler in samplers:
            recorded, launched = (ModelHead(stage, sampler).guesses(states, texts, 3) for stage in both)
            assert recorded == launched


@pytest.mark.parametrize("kind", KINDS)
def test_one_replay_of_a_trained_head_guesses(gpus: TwoGpus, both: Both, kind: str) -> None:
    recorded, launched = both
    network = new_head(kind, recorded.model)
    sampler, texts, states = Sampler(SamplingParams()), [[1]] * ROWS, states_of(ROWS, recorded.state_size)
    expected = TrainedHead(network, sampler, stage=launched).guesses(states, texts, 3)
    assert TrainedHead(network, sampler).guesses(states, texts, 3) == expected
    for request in range(2):
        before, head = gpus.replays, TrainedHead(network, sampler, stage=recorded)
        assert head.guesses(states, texts, 3) == expected
        assert head.candidates(states[:, :1], texts[0], 3) == [token for token, _ in expected[0]]
        assert gpus.replays - before == 2 + (request == 0), "the first one tries its recording"


@pytest.mark.parametrize("params", GUESSING, ids=str)
def test_a_shortlists_guesses(both: Both, params: dict[str, Any]) -> None:
    tokens, size = range(5, 5 + VOCAB), 2 * VOCAB
    ranking = ShortlistSampler(Sampler(SamplingParams(seed=3, **params)), tokens, size)
    recorded, launched = (ModelHead(stage, ranking) for stage in both)
    states, texts = states_of(2, both[0].state_size), [[1], [1, 2]]
    assert recorded.guesses(states, texts, 3) == launched.guesses(states, texts, 3)
    assert recorded.candidates(states, texts[0], 3) == launched.candidates(states, texts[0], 3)
