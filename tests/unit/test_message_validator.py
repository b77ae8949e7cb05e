"""A worker takes what fits its model, and leaves out well-formed messages that do not."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.pipeline.messages import (
    CLIENT,
    MAIN,
    Begin,
    Candidate,
    CatchUp,
    End,
    Entries,
    ExitState,
    HeadStart,
    Message,
    Missing,
    Token,
)
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker

NUM_LAYERS, EXIT_LAYER = 5, 3


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Worker:
    """The main process of a small model, which has run a token."""
    info = describe(str(model_folder(num_layers=NUM_LAYERS)))
    made = Worker(WorkerSpec(MAIN, 2, 2, info, EXIT_LAYER, getattr(torch, request.param), "cpu", 1))
    made.stage.begin(8)
    made.stage.run(0, NUM_LAYERS, [1], 0)
    return made


def good_messages(worker: Worker) -> dict[str, Message]:
    """What a sub-process, the main process and the client say about this very model."""
    stage = worker.stage
    hidden = torch.ones(1, 1, stage.model.config.hidden_size, dtype=worker.spec.dtype)
    entries = stage.export_entries(0, 1, NUM_LAYERS - EXIT_LAYER)
    return {
        "begin": Begin(CLIENT, 1, [1, 2], SamplingParams(3), live=True),
        "token": Token(MAIN, 1, 2, 3, 1, hidden),
        "exit state": ExitState(MAIN, 1, 2, hidden),
        "candidate": Candidate(2, 1, 2, (3, 4)),
        "head start": HeadStart(1, 1, 2, (3, 4), torch.cat([hidden, hidden], 1)),
        "entries": Entries(1, 1, 2, entries),
        "catch-up": CatchUp(MAIN, 1, 2, [3], entries),
        "missing": Missing(1, 1, 0),
    }


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
        *(replace(message, sender=3) for message in good.values()),
        *(replace(message, sender=-2) for message in good.values()),
    ]


def test_what_fits_is_taken_and_what_does_not_is_logged_and_left_out(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    network = LocalNetwork([CLIENT, MAIN])
    worker._endpoint, client = network.endpoint(MAIN), network.endpoint(CLIENT)
    good = good_messages(worker)
    bad = misfits(good, worker.spec.info.vocab_size)
    with caplog.at_level(logging.WARNING):
        for message in good.values():
            client.send(MAIN, message)
            assert worker._receive(lambda: 0) is message
        assert not caplog.messages
        for message in bad:
            client.send(MAIN, message)
            client.send(MAIN, End(CLIENT, 1))
            assert worker._receive(lambda: 0) == End(CLIENT, 1), message
    assert len(caplog.messages) == len(bad)
    assert caplog.messages[0] == "left out what the main process sent, a ExitState: not of this model"
