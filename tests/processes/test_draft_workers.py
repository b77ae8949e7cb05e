"""A draft model in a process of its own: tokens are ordinary decoding's, also if it is lost, stopped or wrong."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice

pytestmark = pytest.mark.processes
PROMPT = [5, 9, 200, 31]
SLOW = EmulatedDevice(4.0)
"""Beside which a draft takes no time."""


def drafting(folder: str, drafter: Any, **settings: Any) -> PPDRuntime:
    """Two stages and a drafter's process, which alone guesses well."""
    given = {"stages": 2, "exit_head": "shared", "repetitions": False, "speculation": "always", "emulate": SLOW}
    return PPDRuntime(folder, drafter=drafter, drafter_device="cpu", **given | settings)


@pytest.mark.parametrize("settings", [{"transport": "local"}, {"launcher": "processes", "guess_vocab": 290}])
def test_tokens_are_ordinary_decodings(
    folder: str, ordinary: OrdinaryDecoding, model_folder: Any, settings: dict[str, Any]
) -> None:
    other = str(model_folder("mistral", num_layers=2, seed=5))
    for drafter in (folder, other):
        with drafting(folder, drafter, **settings) as runtime:
            assert runtime.process_names == ("stage 2", "stage 1", "drafter")
            for sampling in ({}, {"temperature": 1.0, "seed": 3}):
                asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
                result = runtime.generate(PROMPT, **asked)
                assert result.token_ids == ordinary.generate(PROMPT, **asked).token_ids
                if drafter == folder:
                    assert result.stats.hits >= 8, "what it names enters the first stage; some may be late"


def test_a_lost_drafter_costs_no_token_and_comes_back(
    folder: str, ordinary: OrdinaryDecoding, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"max_new_tokens": 200, "ignore_eos": True}
    expected = ordinary.generate(PROMPT, **asked).token_ids
    with drafting(folder, folder, launcher="processes") as runtime:
        stream = runtime.stream(PROMPT, **asked)
        tokens = [next(stream).token_id for _ in range(5)]
        first = worker_processes()["drafter"]
        first.kill()
        tokens += [step.token_id for step in stream]
        assert tuple(tokens) == tuple(expected)
        deadline = time.monotonic() + 60
        while runtime.generate(PROMPT, max_new_tokens=24, ignore_eos=True).stats.hits < 16:
            assert time.monotonic() < deadline, "it does not come back"
        assert worker_processes()["drafter"] != first
        assert runtime.restarts == 1
        os.kill(worker_processes()["drafter"].pid, signal.SIGSTOP)
        assert runtime.generate(PROMPT, **asked).token_ids == expected
        os.kill(worker_processes()["drafter"].pid, signal.SIGCONT)
        assert runtime.generate(PROMPT, **asked).token_ids == expected
    lost = [message for message in caplog.messages if "is lost" in message]
    assert lost == ["the drafter is lost, a new one takes its place: signal 9 ended it"]


def test_a_lost_first_stage_has_a_successor_with_a_draft_model(folder: str, ordinary: OrdinaryDecoding) -> None:
    asked = {"max_new_tokens": 80, "ignore_eos": True}
    expected = ordinary.generate(PROMPT, **asked).token_ids
    with PPDRuntime(
        folder, stages=2, drafter=folder, launcher="processes", speculation="always", emulate=SLOW
    ) as runtime:
        stream = runtime.stream(PROMPT, **asked)
        tokens = [next(stream).token_id for _ in range(5)]
        worker_processes()["stage-1"].kill()
        assert (*tokens, *(step.token_id for step in stream)) == tuple(expected)


def test_what_a_drafters_process_needs(folder: str, tmp_path: Path) -> None:
    for settings, words in (
        ({"stages": 1, "drafter": "m", "drafter_device": "cpu"}, "with stages=1: one stage drafts between its passes"),
        ({"stages": 2, "drafter_device": "cpu"}, "is for a model that drafts, give drafter=MODEL"),
        ({"stages": 2, "drafter": "none", "drafter_device": "cpu"}, "is for a model that drafts"),
        ({"stages": 2, "drafter": "m", "drafter_device": "tpu"}, "drafter_device='tpu': choose auto, cpu, cuda or"),
        ({"k": 2, "drafter_device": "cpu"}, "drafter_device=cpu: is for the staged layout"),
    ):
        with pytest.raises(ValueError, match=words):
            PPDRuntime(folder, **settings)
