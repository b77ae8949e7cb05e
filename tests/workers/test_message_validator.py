"""A worker takes what fits its model, and leaves out well-formed messages that do not."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.specimens import Specimen
from models_for_tests import load_stage

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.pipeline.messages import (
    Begin,
    Cancel,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    Guesses,
    HeadStart,
    Message,
    Missing,
    PromptStates,
    Rows,
    Shutdown,
    Token,
)
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.layouts import CLIENT, DECIDER, PaperLayout, StagedLayout
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.workers.message_validator import MessageValidator
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker

NUM_LAYERS, EXIT_LAYER = 5, 3


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Worker:
    """The main process of a small model, which has run a token."""
    info = describe(str(model_folder(num_layers=NUM_LAYERS)))
    made = Worker(WorkerSpec(DECIDER, PaperLayout(2, EXIT_LAYER, 2), info, getattr(torch, request.param), "cpu", 1))
    made.stage.begin(8)
    made.stage.run(0, NUM_LAYERS, [1], 0)
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stage_worker(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Worker:
    """The second of three stages."""
    info = describe(str(model_folder(num_layers=NUM_LAYERS)))
    return Worker(WorkerSpec(2, StagedLayout((2, 4), 1, 2), info, getattr(torch, request.param), "cpu", 1))


def good_messages(worker: Worker) -> dict[str, Message]:
    """What a sub-process, the main process and the client say about this very model."""
    stage = worker.stage
    hidden = torch.ones(1, 1, stage.model.config.hidden_size, dtype=worker.spec.dtype)
    entries = stage.export_entries(0, 1, NUM_LAYERS - EXIT_LAYER)
    return {
        "begin": Begin(CLIENT, 1, [1, 2], SamplingParams(3), live=True),
        "token": Token(DECIDER, 1, 2, 3, 1, hidden),
        "exit state": ExitState(DECIDER, 1, 2, hidden),
        "candidate": Candidate(2, 1, 2, (3, 4)),
        "head start": HeadStart(1, 1, 2, (3, 4), torch.cat([hidden, hidden], 1)),
        "entries": Entries(1, 1, 2, entries),
        "catch-up": CatchUp(DECIDER, 1, 2, [3], entries),
        "missing": Missing(1, 1, 0),
    }


def settings_that_name(token: int) -> list[dict[str, object]]:
    """Each setting that can name a token, with this one."""
    lists = ("stop_token_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
    return [
        *({name: (1, token)} for name in lists),
        {"forced_bos_token_id": token},
        {"logit_bias": {1: 1.0, token: 1.0}},
        {"bad_words_ids": [[1], [1, token]]},
        {"sequence_bias": [[[token, 1], 1.0]]},
    ]


def misfits(good: dict[str, Message], vocab_size: int) -> list[Message]:
    hidden, entries = good["exit state"].hidden, good["entries"].entries
    states = [hidden[..., :-1], hidden.repeat(1, 2, 1), hidden[0], hidden.half(), hidden[0, 0, 0]]
    others = [
        entries[0],
        entries[:, :1],
        entries[:, :, :1],
        entries[..., :-1],
        entries.repeat(1, 1, 1, 2, 1),
        entries.half(),
        entries.flatten(),
    ]
    tokens = [vocab_size, 2**31 - 1]
    return [
        *(replace(good["exit state"], hidden=state) for state in states),
        *(replace(good["token"], hidden=state) for state in states),
        *(replace(good["token"], token_id=token) for token in tokens),
        *(replace(good["head start"], hidden=state) for state in [*states[:1], *states[2:], hidden]),
        *(replace(good["head start"], token_ids=(3, token)) for token in tokens),
        *(replace(good["candidate"], token_ids=(token,)) for token in tokens),
        *(replace(good["entries"], entries=other) for other in others),
        *(replace(good["catch-up"], entries=other) for other in others),
        *(replace(good["catch-up"], token_ids=[token]) for token in tokens),
        *(replace(good["begin"], prompt_ids=[1, token]) for token in tokens),
        *(replace(good["begin"], delivered=[token]) for token in tokens),
        replace(good["begin"], prompt_ids=[]),
        *(replace(good["begin"], params=SamplingParams(3, **settings)) for settings in settings_that_name(vocab_size)),
        *(replace(message, sender=3) for message in good.values()),
        *(replace(message, sender=-2) for message in good.values()),
    ]


def staged_messages(worker: Worker) -> dict[str, Message]:
    """What stages say to each other about this very model."""
    hidden = torch.ones(1, 2, worker.stage.model.config.hidden_size, dtype=worker.spec.dtype)
    last = worker.spec.info.vocab_size - 1
    return {
        "prompt": PromptStates(1, 1, 2, 256, hidden),
        "rows": Rows(1, 1, 2, 7, (12, 13), (11, 11), (5, 5), (17, last), hidden),
        "guesses": Guesses(1, 1, 2, 7, (12,), (17, last), (500_000, 250_000)),
        "no guesses": Guesses(DECIDER, 1, 2, 7, (), (), ()),
    }


def staged_misfits(good: dict[str, Message], vocab_size: int) -> list[Message]:
    hidden = good["rows"].hidden
    other = torch.float16 if hidden.dtype == torch.bfloat16 else torch.bfloat16
    states = [hidden[..., :-1], hidden.repeat(1, 1, 2), hidden.repeat(2, 1, 1), hidden[0], hidden.to(other)]
    tokens = [vocab_size, 2**31 - 1]
    return [
        *(replace(good["prompt"], hidden=state) for state in states),
        *(replace(good["rows"], hidden=state) for state in [*states, hidden[:, :1], hidden.repeat(1, 2, 1)]),
        *(replace(good[name], token_ids=(17, token)) for name in ("rows", "guesses") for token in tokens),
        *(replace(message, sender=sender) for message in good.values() for sender in (3, -2)),
    ]


def check_what_is_taken(
    worker: Worker, good: list[Message], bad: list[Message], caplog: pytest.LogCaptureFixture
) -> None:
    """What fits is taken as it is; what does not is logged and left out."""
    rank = worker.spec.rank
    network = LocalNetwork([CLIENT, rank])
    worker._endpoint, client = network.endpoint(rank), network.endpoint(CLIENT)
    with caplog.at_level(logging.WARNING):
        for message in good:
            client.send(rank, message)
            assert worker._receive(lambda: 0) is message
        assert not caplog.messages
        for message in bad:
            client.send(rank, message)
            client.send(rank, End(CLIENT, 1))
            assert worker._receive(lambda: 0) == End(CLIENT, 1), message
    assert len(caplog.messages) == len(bad)


def test_what_fits_is_taken_and_what_does_not_is_logged_and_left_out(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    good = good_messages(worker)
    check_what_is_taken(worker, [*good.values()], misfits(good, worker.spec.info.vocab_size), caplog)
    width, number = worker.stage.model.config.hidden_size, worker.spec.dtype
    states = f"hidden states [1, 1, {width - 1}] in {number} and not [1, 1, {width}] in {number}"
    assert caplog.messages[0] == f"left out what the main process sent, a ExitState: {states}"


def test_stages_take_states_rows_and_guesses_of_their_model_alone(
    stage_worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    good = staged_messages(stage_worker)
    bad = staged_misfits(good, stage_worker.spec.info.vocab_size)
    check_what_is_taken(stage_worker, [*good.values()], bad, caplog)
    assert caplog.messages[0].startswith("left out what stage 1 sent, a PromptStates: hidden states [1, 2, ")


def test_a_token_of_wide_states_has_the_whole_state_in_the_papers_layout(tmp_path: Path) -> None:
    Specimen(
        "gemma4_text", "wide", {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
    ).build().save_pretrained(tmp_path)
    stage, info = load_stage(tmp_path), describe(str(tmp_path))
    validator = MessageValidator(stage, WorkerSpec(1, PaperLayout(1, 2, 1), info, torch.float32, "cpu", 1))
    assert stage.state_size > stage.model.config.hidden_size
    assert validator.fault(Token(DECIDER, 1, 2, 3, 1, torch.ones(1, 1, stage.state_size))) == ""
    assert validator.fault(Token(DECIDER, 1, 2, 3, 1, torch.ones(1, 1, stage.model.config.hidden_size)))


def test_a_drafter_only_guesses_and_asks(model_folder: Callable[..., Path]) -> None:
    folder, layout = model_folder(num_layers=NUM_LAYERS), StagedLayout((2,), 1, 2, drafts=True)
    info = describe(str(folder))
    validator = MessageValidator(load_stage(folder), WorkerSpec(1, layout, info, torch.float32, "cpu", 1))
    for allowed in (Guesses(2, 1, 0, 0, (5,), (3,), (7,)), Missing(2, 1, 0)):
        assert validator.fault(allowed) == ""
    begin = Begin(2, 1, [1, 2], SamplingParams(3), live=True)
    for message in (Token(2, 1, 3, 4, 0), Shutdown(2, 1), Cancel(2, 1), begin):
        assert validator.fault(message) == "a drafter has no say in that"
    assert validator.fault(Guesses(2, 1, 0, 0, (5,), (3, 4), (7,))) == "2 tokens with 1 chances for 1 nodes"
