"""What a worker refuses, it says: the request ends with an error or heals, and nothing looks like a death."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused
from models_for_tests import build_tokenizer, save_model
from ways import LAYOUTS, PROMPT, WAYS

from ppd_runtime import OrdinaryDecoding, PPDRuntime, RequestError, SamplingParams, open_method
from ppd_runtime.client.ending import Ending
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.pipeline.messages import (
    Begin,
    Candidate,
    Guesses,
    HeadStart,
    Message,
    PromptStates,
    Refused,
    Rows,
    Unreadable,
)
from ppd_runtime.settings.layouts import CLIENT, StagedLayout
from ppd_runtime.transport.local import LocalEndpoint, LocalNetwork
from ppd_runtime.workers import worker
from ppd_runtime.workers.spec import WorkerSpec

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_layers=4, tied=False, quiet_from=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    """The text behind `PROMPT`."""
    ordinary = OrdinaryDecoding(str(folder), dtype="float32")
    return ordinary.generate(PROMPT, max_new_tokens=24, ignore_eos=True).token_ids


@pytest.fixture(autouse=True)
def nobody_is_lost(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No refusal and no failed request looks like a death."""
    caplog.set_level(logging.WARNING, "ppd_runtime")
    yield
    assert not [line for line in caplog.messages if "is lost" in line]


@pytest.fixture(scope="module")
def larger_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer has been given one token more than the model has."""
    out = save_model(tmp_path_factory.mktemp("padded"), "llama", num_layers=4, tied=False, quiet_from=2)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(out)
    return str(out)


@pytest.mark.parametrize("way", ["ordinary", *LAYOUTS, "layerskip"])
def test_tokens_that_the_model_lacks_are_refused_before_anything_starts(larger_tokenizer: str, way: str) -> None:
    words = (
        "the tokenizer makes '<pad>' token id 300, which the model lacks .it has 0 to 299.: leave it out of the text"
    )
    method = open_method(larger_tokenizer, dtype="float32", **WAYS[way])
    chat = [{"role": "user", "content": "fox <pad>"}]
    for call in (
        lambda: method.generate("fox <pad>"),
        lambda: method.generate(["fox", "fox <pad>"]),
        lambda: method.stream("fox <pad>"),
        lambda: method.chat(chat),
        lambda: method.encoded(["fox", "fox <pad>"]),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary: choose 0 to 299"):
        method.generate([5, 300])
    with pytest.raises(ValueError, match="stop_token_ids=300: is outside the vocabulary, choose 0 to 299"):
        method.generate("fox", stop_token_ids=[3, 300])
    with pytest.raises(ValueError, match="prompt 2 of 2: the tokenizer"):
        method.encoded(["fox", "fox <pad>"])
    assert not isinstance(method, PPDRuntime) or method._workers is None
    method.close()


@pytest.mark.parametrize(
    "command", ["match-rate --exit-layers 2", "bench --methods layerskip", "plan", "search-layers", "train exit-head"]
)
def test_measuring_and_training_refuse_them_first(larger_tokenizer: str, tmp_path: Path, command: str) -> None:
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a quick fox"}\n{"prompt": "fox <pad>"}\n')
    given, out = "--data" if "train" in command else "--prompts", tmp_path / "out"
    files = [given, str(tmp_path / "texts.jsonl"), "--out", str(out)]
    line = refused(*command.split(), "--model", larger_tokenizer, *files)
    which = "" if "train" in command else "prompt 2 of 2: "
    assert line.startswith(f"ppd: {which}the tokenizer makes '<pad>' token id 300, which the model lacks")
    assert not out.exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_says_what_it_refuses_and_lives_on(folder: Path, expected: tuple[int, ...], layout: str) -> None:
    """What no check of this process has seen."""
    with PPDRuntime(str(folder), dtype="float32", **LAYOUTS[layout]) as runtime:
        for prompt, reason in (([5, 300], "token id 300 is not among the model's 300"), ([], "an empty prompt")):
            began = time.monotonic()
            with pytest.raises(RequestError, match=f"refuses the request: {reason}"):
                list(runtime._steps(prompt, SamplingParams(3), 0, Ending(None)))
            assert time.monotonic() - began < 30, "nobody waits"
        assert runtime.generate(PROMPT, max_new_tokens=8, ignore_eos=True).token_ids == expected[:8]
        assert runtime.restarts == 0


class Mangled:
    """Some messages between threads do not arrive as they were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Message], times: float, change: Any) -> None:
        self.left, send = times, LocalEndpoint.send

        def deliver(endpoint: LocalEndpoint, address: int, message: Message) -> None:
            if isinstance(message, kind) and self.left > 0:
                self.left -= 1
                message = change(message)
            send(endpoint, address, message)

        monkeypatch.setattr(LocalEndpoint, "send", deliver)


def cut(message: PromptStates | Rows) -> Message:
    """Of another model's width."""
    return replace(message, hidden=message.hidden[..., :-1])


def unreadable(message: Message) -> Message:
    """As an endpoint gives it whose bytes are none."""
    return Unreadable(message.sender, message.request, type(message).__name__, "not a message of wire version 0")


LOST = [
    ("three stages", PromptStates, cut, "stage 2 refuses what stage 1 sends: hidden states"),
    ("three stages", Rows, cut, "stage 2 refuses what stage 1 sends: hidden states"),
    ("stages of rows", Begin, unreadable, "stage 2 refuses what the client sends: not a message of wire version 0"),
    ("k=2", Begin, unreadable, "the main process refuses what the client sends: not a message of wire version 0"),
]


@pytest.mark.parametrize("again_and_again", [False, True])
@pytest.mark.parametrize(("layout", "kind", "change", "words"), LOST)
def test_what_is_refused_is_sent_again_and_in_the_end_ends_its_request(
    folder: Path,
    expected: tuple[int, ...],
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    kind: type[Message],
    change: Any,
    words: str,
    again_and_again: bool,
) -> None:
    mangled = Mangled(monkeypatch, kind, math.inf if again_and_again else 2, change)
    with PPDRuntime(str(folder), dtype="float32", **LAYOUTS[layout]) as runtime:
        if again_and_again:
            with pytest.raises(RequestError, match=words):
                runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
            mangled.left = 0
        result = runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
        assert result.token_ids == expected[:20]
        assert not mangled.left
        assert runtime.restarts == 0


def test_what_only_speculates_is_left_out_without_a_word(
    folder: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for layout, kind in (("k=2", HeadStart), ("k=2", Candidate), ("stages of rows", Guesses)):
        with monkeypatch.context() as patch:
            Mangled(patch, kind, math.inf, lambda message: replace(message, token_ids=(300,) * len(message.token_ids)))
            with PPDRuntime(str(folder), dtype="float32", **LAYOUTS[layout]) as runtime:
                result = runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
            assert result.token_ids == expected[:20]


def test_refusals_are_told_now_and_then(folder: Path) -> None:
    """However many messages come: the client has to be told once."""
    made = worker.Worker(WorkerSpec(2, StagedLayout((1, 3), 1, 2), describe(str(folder)), torch.float32, "cpu", 1))
    network = LocalNetwork([CLIENT, 2])
    made._endpoint, client = network.endpoint(2), network.endpoint(CLIENT)
    wrong = Rows(1, 7, 2, 7, (12,), (11,), (5,), (300,), torch.ones(1, 1, 32))
    for _ in range(1000):
        client.send(2, wrong)
    client.send(2, replace(wrong, request=8))
    client.send(2, replace(wrong, sender=9))
    client.send(2, Begin(CLIENT, 9, [300], SamplingParams(3), True))
    client.send(2, Begin(CLIENT, 9, [300], SamplingParams(3), True))
    assert made._receive(lambda: 0) is None
    told = []
    while (message := client.receive(0)) is not None:
        told.append(message)
    reason = "token id 300 is not among the model's 300"
    of_rows = [message for message in told if message == Refused(2, 7, 1, reason, False)]
    assert 1 <= len(of_rows) < 100
    assert told[len(of_rows) :] == [
        Refused(2, 8, 1, reason, False), Refused(2, 9, CLIENT, reason, True), Refused(2, 9, CLIENT, reason, True)
    ]  # fmt: skip
