"""Texts of a server's answers: halves of characters, special tokens, line ends in events, and where chats end."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models_for_tests import END, END_ID, build_model, build_tokenizer
from servers import Running, running
from test_token_texts import content_of
from tokenizer_kinds import with_tokenizer
from tokenizers import processors

from ppd_runtime import OrdinaryDecoding

FOX = "🦊"
LINE_ENDS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\n"


def chat(server: Running, **settings: object) -> dict:
    """A choice."""
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **settings)
    return answer.json()["choices"][0]


def events(server: Running, path: str, **body: object) -> list[dict]:
    """A stream's events as httpx cuts lines, which is as `str.splitlines` does."""
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_bytes_of_a_chats_tokens_are_its_message(server: Running, temperature: float) -> None:
    """A random model's tokens are halves of characters more often than not."""
    halves = 0
    for seed in range(4):
        settings = {"max_tokens": 40, "temperature": temperature, "seed": seed, "ignore_eos": True}
        choice = chat(server, **settings, logprobs=True, top_logprobs=3)
        told = choice["logprobs"]["content"]
        text = b"".join(bytes(entry["bytes"]) for entry in told).decode(errors="replace")
        assert text == choice["message"]["content"]
        halves += sum(entry["token"].startswith("bytes:") for entry in told)
        chunks = events(server, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **settings)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert halves > 3


def test_the_tokens_of_an_echo_are_its_text(server: Running, ordinary: OrdinaryDecoding) -> None:
    asked = {"prompt": f"{FOX} é{END}", "echo": True, "logprobs": 5, "max_tokens": 30, "temperature": 0}
    choice = server.post("/v1/completions", **asked, ignore_eos=True).json()["choices"][0]
    text, told = choice["text"], choice["logprobs"]
    assert text.startswith(asked["prompt"])
    assert len({len(values) for values in told.values()}) == 1
    size = len(ordinary.prompt_ids(asked["prompt"]))
    names = [name for at, name in enumerate(told["tokens"]) if at < size or name != END]
    assert b"".join(map(content_of, names)).decode(errors="replace") == text
    assert told["text_offset"][:2] == [0, 0], "within one character"
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert name.startswith("bytes:") or name == END or text[offset:].startswith(name)
    for name, top, logprob in zip(told["tokens"], told["top_logprobs"], told["token_logprobs"], strict=True):
        assert top is None or (len(top) in (5, 6) and top[name] == logprob)
    alone = server.post("/v1/completions", **{**asked, "logprobs": None}, ignore_eos=True).json()["choices"][0]
    assert alone["text"] == text
    by_ids = server.post(
        "/v1/completions", **{**asked, "prompt": ordinary.prompt_ids(asked["prompt"])}, ignore_eos=True
    )
    assert (by_ids.json()["choices"][0]["text"], by_ids.json()["choices"][0]["logprobs"]) == (text, told)


def test_special_tokens_that_the_tokenizer_adds_are_no_text_of_an_echo(model_folder, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    frame = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    tokenizer.backend_tokenizer.post_processor = frame
    with running(OrdinaryDecoding(with_tokenizer(model_folder("llama", num_layers=2), tmp_path, tokenizer))) as server:
        asked = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}
        choice = server.post("/v1/completions", **asked).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == [END, "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_events_are_lines_for_every_client(server: Running) -> None:
    asked = {"prompt": LINE_ENDS, "echo": True, "max_tokens": 3, "temperature": 0}
    told = events(server, "/v1/completions", **asked)
    assert told[0]["choices"][0]["text"] == LINE_ENDS
    with server.client() as client:
        raw = client.post("/v1/completions", json={**asked, "prompt": f"{LINE_ENDS}é{FOX}", "stream": True}).content
    assert f"é{FOX}" in raw.decode(), "other characters stay as they are"


def test_errors_in_a_stream_are_lines_for_every_client(ordinary: OrdinaryDecoding) -> None:
    class Failing(OrdinaryDecoding):
        def _steps(self, *asked: object) -> Iterator[object]:
            yield from itertools.islice(super()._steps(*asked), 2)
            raise RuntimeError(LINE_ENDS)

    with running(Failing(ordinary.info.folder)) as server:
        *_, last = events(server, "/v1/completions", prompt="a", max_tokens=9)
    assert last["error"]["message"] == LINE_ENDS


def test_a_stream_has_an_event_for_each_token_that_has_no_text(model_folder, tmp_path: Path) -> None:
    """A client that waits for bytes sees that it is alive."""
    model = build_model("llama", num_layers=2)
    torch.nn.init.zeros_(model.model.norm.weight)  # the likeliest token is the first, which is special
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with running(OrdinaryDecoding(tmp_path)) as server:
        told = events(server, "/v1/completions", prompt="a", max_tokens=50, temperature=0, ignore_eos=True)
        stopped = server.post("/v1/completions", prompt="a", max_tokens=50, temperature=0, stop=f"{END}{END}")
    assert [event["choices"][0]["text"] for event in told] == [""] * 51
    assert told[-1]["choices"][0]["finish_reason"] == "length"
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    assert stopped.json()["usage"]["completion_tokens"] == 2
