"""Requests at work in the server: long prompts, slow readers, texts that are cut short, and what is counted of them."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import DEADLINE_S, Stepwise, running
from waiting import wait_until

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.client.ending import CANCELLED
from ppd_runtime.methods.request_queue import RequestQueue
from ppd_runtime.methods.steps import Step, Totals
from ppd_runtime.server.app import application
from ppd_runtime.server.completions import Service
from ppd_runtime.server.settings import ServerSettings

PROMPT = "import os and then"


class Encoding(OrdinaryDecoding):
    """Ordinary decoding whose prompts take until a test lets them go on."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def prompt_ids(self, *args: Any) -> list[int]:
        self._wait()
        return super().prompt_ids(*args)

    def chat_prompt(self, *args: Any, **options: Any) -> str:
        self._wait()
        return super().chat_prompt(*args, **options)

    def _wait(self) -> None:
        self.entered.set()
        self.may_go_on.wait(DEADLINE_S / 4)


@pytest.mark.parametrize(
    ("path", "body", "room"),
    [
        ("/tokenize", {"prompt": "a"}, 0),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 0),
        ("/detokenize", {"tokens": [5]}, 0),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "n": 2}, 4),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, 1),
    ],
)
def test_a_long_prompt_keeps_nobody_waiting_and_has_its_room(
    folder: Path, template: Path, path: str, body: dict, room: int
) -> None:
    encoding = Encoding(folder)
    with running(encoding, chat_template=template) as server:
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(server.post(path, **body).status_code))
        asking.start()
        assert encoding.entered.wait(DEADLINE_S)
        with server.client() as client:
            assert client.get("/version", timeout=DEADLINE_S / 8).status_code == 200
        assert server.taken == room
        encoding.may_go_on.set()
        asking.join(DEADLINE_S)
        assert (answers, server.taken) == ([200], 0)


def test_long_prompts_keep_no_probe_waiting(folder: Path) -> None:
    encoding, many = Encoding(folder), min(32, (os.cpu_count() or 1) + 4)  # as many threads as a loop has by itself
    with running(encoding) as server, ThreadPoolExecutor(many) as asking, server.client() as client:
        answers = [asking.submit(server.post, "/tokenize", prompt="a") for _ in range(many)]
        wait_until(lambda: len(server.server.server_state.tasks) == many)
        assert client.get("/health", timeout=DEADLINE_S / 8).status_code == 200
        encoding.may_go_on.set()
        assert [answer.result(DEADLINE_S).status_code for answer in answers] == [200] * many


class CutShort(OrdinaryDecoding):
    """Ordinary decoding that ends as a cancelled request of stages does: no token says that it is the last."""

    def _steps(self, *args: Any) -> Iterator[Step | Totals]:
        for step in super()._steps(*args):
            yield replace(step, finish_reason=CANCELLED) if isinstance(step, Totals) else replace(step, last=False)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_is_cut_short_has_all_of_its_text(folder: Path, template: Path, chat: bool) -> None:
    expected = OrdinaryDecoding(folder).generate(f"user: {PROMPT}\n", max_new_tokens=3).text
    given = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": f"user: {PROMPT}\n"}
    asked = {"max_tokens": 3, "temperature": 0, "stream": True, "stop": f"{expected} and no more", **given}
    with running(CutShort(folder), chat_template=template) as server:
        *lines, done = server.post("/v1/chat/completions" if chat else "/v1/completions", **asked).text.split("\n\n")[
            :-1
        ]
        with server.client() as client:
            counted = client.get("/metrics").text
    assert 'vllm:request_success_total{finished_reason="length",model_name=' in counted, "as the client is told"
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert texts == [""] * (len(texts) - 1) + [expected]
    assert (choices[-1]["ppd"]["finish_reason"], done) == ("cancelled", "data: [DONE]")


def test_who_does_not_read_holds_no_room(folder: Path) -> None:
    async def ask() -> None:
        settings = ServerSettings()
        service = Service(OrdinaryDecoding(folder), settings)
        reading, writes = asyncio.Event(), asyncio.Event()
        body = json.dumps({"prompt": PROMPT, "max_tokens": 5, "stream": True}).encode()
        arriving = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not arriving:
                await asyncio.Event().wait()
            return arriving.pop()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                writes.set()
                await reading.wait()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        place = {"method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        answering = asyncio.create_task(application(service, settings, None)({"type": "http", **place}, receive, send))
        await asyncio.wait_for(writes.wait(), DEADLINE_S)
        await until(lambda: not service.generator.queue.taken)
        reading.set()
        await answering
        service.end_threads()

    asyncio.run(ask())


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S / 4
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_choice_that_waits_for_room_waits_and_leaves_with_its_client(folder: Path) -> None:
    """There are turns enough, and too few tokens of room."""
    stepwise = Stepwise(folder)
    stepwise.queue = RequestQueue(3, 100)
    asked = {"prompt": [5], "ignore_eos": True, "stream": True}
    long, short = ({**asked, "max_tokens": tokens} for tokens in (80, 50))
    with (
        running(stepwise) as server,
        server.client() as client,
        client.stream("POST", "/v1/completions", json=long) as first,
    ):
        lines = first.iter_lines()
        assert next(lines).startswith("data:")
        with server.client() as other, other.stream("POST", "/v1/completions", json=short):
            wait_until(lambda: stepwise.queue.waiting)
            counted = server.counts()
            assert [counted[f"vllm:num_requests_{name}"] for name in ("running", "waiting")] == [1, 1]
        wait_until(lambda: not stepwise.queue.waiting and server.taken == 1)
        counted = server.counts()
        assert [counted[f"vllm:num_requests_{name}"] for name in ("running", "waiting")] == [1, 0]
        stepwise.allow(100)
        assert sum('"finish_reason":null' in line for line in lines) == 79
