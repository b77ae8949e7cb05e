"""Clients of a server that ask, go away and send nonsense, by chance; every text is compared with one known before."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import bad_requests
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.tune.prompt_files import read_prompts

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
_DEADLINE_S = 180.0
"""For an answer, or a further piece of one: longer than a stopped worker takes to be replaced."""
_MOST_PROBLEMS = 50  # that are kept in words


OUTCOMES = ("right", "wrong text", "lost", "failed", "refused", "client left", "bad", "bad, taken")
"""Ordinary decoding's text, another, no answer, status 500, status 429 or 503, left by the client; bad and refused, and
bad and not refused as it should be."""


@dataclass(frozen=True)
class KnownRequest:
    """A request, and what ordinary decoding answers."""

    path: str
    body: dict[str, Any]
    choices: tuple[tuple[str, str], ...]
    """Text and finish reason of each."""


def known(ordinary: OrdinaryDecoding, generator: random.Random, most_tokens: int, most_prompt: int) -> KnownRequest:
    """A request drawn by chance: prompts and answers of all lengths, greedy and sampled, texts, ids and chats."""
    settings = _settings(generator, most_tokens)
    body = {**settings, "max_tokens": settings["max_new_tokens"]}
    del body["max_new_tokens"]
    if generator.random() < 0.2:
        messages = [{"role": "user", "content": _text(generator)[-1000:]}]
        prompt: str | list[int] = ordinary.chat_prompt(messages, CHAT_TEMPLATE)
        path, body["messages"], special = "/v1/chat/completions", messages, False
    else:
        prompt = _text(generator) if generator.random() < 0.5 else _ids(generator, ordinary, most_prompt)
        path, body["prompt"], special = "/v1/completions", prompt, True
    n = 2 if settings.get("temperature") and generator.random() < 0.2 else 1
    if generator.random() < 0.1:
        body |= {"logprobs": True} if "messages" in body else {"logprobs": 1}
    results = ordinary.generate(prompt, n=n, add_special_tokens=special, **settings)
    choices = ((result.text, "length" if result.finish_reason == "length" else "stop") for result in results)
    return KnownRequest(path, {**body, "n": n}, tuple(choices))


def _settings(generator: random.Random, most_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_new_tokens": generator.randint(1, most_tokens), "temperature": 0.0}
    if generator.random() < 0.5:
        found |= {"temperature": generator.uniform(0.5, 1.2), "seed": generator.randrange(2**40)}
        found |= generator.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.1}])
    if generator.random() < 0.2:
        found["stop"] = generator.choice(["\n\n", ["self", ")"], "the"])
    if generator.random() < 0.3:
        found["ignore_eos"] = True
    return found


def _text(generator: random.Random) -> str:
    text = generator.choice(read_prompts("demo")).text
    return text[: generator.randint(1, len(text))]


def _ids(generator: random.Random, ordinary: OrdinaryDecoding, most: int) -> list[int]:
    longest = most if generator.random() < 0.1 else 40
    return [generator.randrange(ordinary.info.vocab_size) for _ in range(generator.randint(1, longest))]


@dataclass
class Outcomes:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """By `OUTCOMES`."""
    tokens: int = 0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All, bad ones too."""
        return sum(self.outcomes.values())

    def note(self, outcome: str, problem: str = "") -> None:
        """One request's."""
        self.outcomes[outcome] += 1
        if problem and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"{outcome}: {problem}")


@dataclass
class Client:
    """One of several, which asks again as soon as it has its answer."""

    url: str
    texts: Sequence[KnownRequest]
    tally: Outcomes
    generator: random.Random
    leave_share: float
    """Of the requests that are not bad."""
    bad_share: float

    async def ask_until(self, over: asyncio.Event) -> None:
        """Ask by chance until it is over."""
        async with self._connected() as http:
            while not over.is_set():
                if self.generator.random() < self.bad_share:
                    await self._send_bad()
                elif self.generator.random() < self.leave_share:
                    await self._leave(http, self.generator.choice(self.texts))
                else:
                    await self.ask(http, self.generator.choice(self.texts), self.generator.random() < 0.5)

    async def ask_for(self, texts: Sequence[KnownRequest]) -> None:
        """Ask for each of some texts once."""
        async with self._connected() as http:
            for text in texts:
                await self.ask(http, text, self.generator.random() < 0.5)

    async def ask(self, http: httpx.AsyncClient, text: KnownRequest, stream: bool) -> None:
        """One request, to the end of its answer."""
        began = time.monotonic()
        try:
            outcome, found = await (self._streamed if stream else self._whole)(http, text)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            outcome, found = "lost", _with_causes(error)
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
        self.tally.note(outcome, found and f"{'stream' if stream else 'whole'} {text.path} {text.body}: {found}"[:2000])

    def _connected(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=_DEADLINE_S, trust_env=False)

    async def _whole(self, http: httpx.AsyncClient, text: KnownRequest) -> tuple[str, str]:
        answer = await http.post(text.path, json=text.body)
        if answer.status_code != 200:
            return self._refused(answer.status_code, answer.json()["error"]["message"])
        told = answer.json()
        self.tally.tokens += told["usage"]["completion_tokens"]
        found = [
            (choice["message"]["content"] if "messages" in text.body else choice["text"], choice["finish_reason"])
            for choice in told["choices"]
        ]
        return self._compared(text, found)

    async def _streamed(self, http: httpx.AsyncClient, text: KnownRequest) -> tuple[str, str]:
        reasons = dict[int, str]()
        pieces: dict[int, list[str]] = {number: [] for number in range(len(text.choices))}
        body = {**text.body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", text.path, json=body) as answer:
            if answer.status_code != 200:
                return self._refused(answer.status_code, json.loads(await answer.aread())["error"]["message"])
            last = ""
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    last = line or last
                    continue
                told = json.loads(line.removeprefix("data: "))
                if "error" in told:
                    return self._refused(500, told["error"]["message"])
                for choice in told["choices"]:
                    piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                    pieces[choice["index"]].append(piece)
                    reasons |= {choice["index"]: reason} if (reason := choice["finish_reason"]) else {}
                self.tally.tokens += (told.get("usage") or {}).get("completion_tokens", 0)
        if last != "data: [DONE]":
            return "lost", f"the stream ends with {last!r} after {pieces}"
        return self._compared(text, [("".join(parts), reasons[number]) for number, parts in pieces.items()])

    def _refused(self, status: int, message: str) -> tuple[str, str]:
        if status in (429, 503):
            return "refused", ""
        return ("failed" if status >= 500 else "lost"), f"{status} {message}"

    def _compared(self, text: KnownRequest, found: Sequence[tuple[str, str]]) -> tuple[str, str]:
        if tuple(found) == text.choices:
            return "right", ""
        return "wrong text", f"{found}, ordinary decoding's are {text.choices}"

    async def _leave(self, http: httpx.AsyncClient, text: KnownRequest) -> None:
        """Ask, and go away before the answer or in the middle of it."""
        with contextlib.suppress(httpx.HTTPError, asyncio.TimeoutError):
            if self.generator.random() < 0.5:
                await asyncio.wait_for(http.post(text.path, json=text.body), self.generator.uniform(0.001, 0.3))
            else:
                pieces = self.generator.randint(0, 8)
                async with http.stream("POST", text.path, json={**text.body, "stream": True}) as answer:
                    async for line in answer.aiter_lines():
                        pieces -= line.startswith("data:")
                        if pieces < 0:
                            break
        self.tally.note("client left")

    async def _send_bad(self) -> None:
        request = bad_requests.draw(self.generator)
        try:
            problem = await bad_requests.send(self.url, request)
        except OSError as error:
            problem = f"{request.what}: {error}"
        self.tally.note("bad, taken" if problem else "bad", problem)


def write_template(folder: Path) -> Path:
    """The chats' template as a file."""
    path = folder / "chat.jinja"
    path.write_text(CHAT_TEMPLATE)
    return path


def _with_causes(error: BaseException | None) -> str:
    """An error and what it came from; a client's library says little itself."""
    found = []
    while error is not None:
        found.append(repr(error))
        error = error.__cause__ or error.__context__
    return " from ".join(found)
