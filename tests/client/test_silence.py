"""A main process that computes for longer than its client listens to a silence is not taken for a lost one."""

import pytest
from pipeline_runs import begin_message

import ppd_runtime.client.request
import ppd_runtime.workers.roles
import ppd_runtime.workers.session
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.pipeline.messages import Missing, PromptStates
from ppd_runtime.pipeline.ports import WaitFor
from ppd_runtime.pipeline.staged.last_stage import LastStage

CHUNK = 256


@pytest.fixture
def folder(model_folder):
    """A small model."""
    return str(model_folder("llama", num_layers=4, max_position_embeddings=10 * CHUNK))


@pytest.fixture
def hurried(monkeypatch):
    """A client that asks often, and listens to a silence for two seconds."""
    monkeypatch.setattr(ppd_runtime.client.request, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(ppd_runtime.client.request, "_LONGEST_PATIENCE_S", 0.1)
    monkeypatch.setattr(ppd_runtime.client.request, "_SILENCE_DEADLINE_S", 2.0)
    monkeypatch.setattr(ppd_runtime.workers.session, "_SILENCE_S", 0.1)


def test_a_long_prompt_is_no_silence(folder, hurried):
    """Its chunks take a third of a second each, all of it more than the client listens for."""
    prompt, settings = [7] * (9 * CHUNK), {"max_new_tokens": 2, "ignore_eos": True}
    device, dtype = EmulatedDevice(150), {"dtype": "float32"}
    expected = OrdinaryDecoding(folder, **dtype).generate(prompt, **settings).token_ids
    with PPDRuntime(folder, stages=2, k=1, transport="local", emulate=device, **dtype) as runtime:
        result = runtime.generate(prompt, **settings)
        assert result.token_ids == expected
        assert runtime.restarts == 0
    assert result.stats.time_to_first_token_s > 2.5


def _nothing(*_):
    while True:
        yield WaitFor(None)


def test_who_takes_a_silent_ones_place_has_twice_as_long(folder, hurried, monkeypatch, caplog):
    """The same prompt waits for it."""
    monkeypatch.setattr(ppd_runtime.client.request, "_SILENCE_DEADLINE_S", 1.0)
    monkeypatch.setattr(ppd_runtime.workers.roles.MainProcess, "decode", _nothing)
    lost = pytest.raises(RuntimeError, match="after 1 restarts: it has said nothing for 2 s")
    with PPDRuntime(folder, k=1, transport="local", max_restarts=1) as runtime, lost:
        runtime.generate([5, 9], max_new_tokens=5)
    assert "it has said nothing for 1 s" in caplog.text


class SilentStages:
    """A last stage to which nothing comes."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        begin = begin_message([3, 1, 4], SamplingParams(max_new_tokens=8))
        stage = _Stage()
        self.last = LastStage(stage, 4, (1,), lambda _, message: self.sent.append(message), begin)
        self.machine = self.last.decode(None, _Stop())
        self.wanted = next(self.machine)

    def go_on(self, message: object = None) -> None:
        """To its next real wait, with a message or without one."""
        self.wanted = self.machine.send(message)
        while self.wanted.patience == 0:
            self.wanted = self.machine.send(None)


class _Stage:
    num_layers = layer_passes = 0

    def begin(self, *_: object) -> None:
        pass

    def prompt_chunks(self, tokens: int) -> list[range]:
        return [range(2), range(2, tokens)]


class _Stop:
    def finish_reason(self, token: int) -> None:
        pass


def test_a_prompt_that_has_not_come_is_asked_for_before_all_begin_again():
    """It may still be read: what begins again computes all of it once more."""
    stages = SilentStages()
    stages.go_on()
    first = stages.last.epoch
    for asked in range(1, 4):
        stages.go_on()
        assert stages.last.epoch == first
        assert sum(isinstance(message, Missing) for message in stages.sent) == asked
    stages.go_on()
    assert stages.last.epoch == first + 1


def test_what_does_not_follow_a_prompts_beginning_is_asked_for_once(monkeypatch):
    stages = SilentStages()
    stages.go_on()
    first = stages.last.epoch
    monkeypatch.setattr(stages.last._prompt, "_waiting", {0: None})
    monkeypatch.setattr(type(stages.last._prompt), "next_position", None)
    stages.go_on()
    assert (stages.last.epoch, isinstance(stages.sent[-1], Missing)) == (first, True)
    stages.go_on()
    assert stages.last.epoch == first + 1
    assert not any(isinstance(message, PromptStates) for message in stages.sent)
