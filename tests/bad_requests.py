"""Requests that no server should take, drawn by chance: wrong values, broken JSON, broken HTTP.

Each has to be refused with a status from 400 to 499 and OpenAI's error object.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_ANSWER_S = 60.0
_MANY = 10**9
_NESTED: Any = json.loads("[" * 500 + "]" * 500)

_SAMPLING: Mapping[str, Sequence[Any]] = {
    "max_tokens": (-2, 2**31, 1.5, "5", True, [], {}, 10**40),
    "temperature": (-0.1, 101, "hot", [], True, float("inf"), float("nan")),
    "top_p": (-0.1, -1, 1.01, "x", float("nan")),
    "top_k": (-2, 1.5, "x", 2**31),
    "min_p": (-0.1, 1.1, "x"),
    "repetition_penalty": (0, -1, 101, "x"),
    "presence_penalty": (-2.1, 2.1, "x"),
    "frequency_penalty": (-2.1, 2.1, []),
    "seed": (2**64, -(2**63) - 1, 1.5, "1", float("nan")),
    "stop": (5, [5], [[]], {}, ["x"] * 10_000, [""]),
    "stop_token_ids": ("a", ["a"], [1.5], [-1], [_MANY]),
    "ignore_eos": ("yes", 1, []),
    "n": (0, -1, 129, _MANY, 1.5, "2"),
    "stream": ("yes", 1, []),
    "stream_options": ({"include_usage": True}, 5, {"other": 1}),
    "tools": ([{}], 5),
    "logit_bias": ({"5": 101}, {"5": "x"}, {"x": 1}, {"-1": 1}, {str(_MANY): 1}, [5], 5),
    "response_format": ({"type": "json_object"},),
}
_COMPLETION: Mapping[str, Sequence[Any]] = {
    **_SAMPLING,
    "prompt": (5, {}, [], [[]], [1.5], [True], [-1], [_MANY], [["a"]], [None], ["a", 5], [[1], [-1]], "word " * 10_000),
    "echo": ("yes", 1),
    "logprobs": (-1, 10_000, "x", 1.5, True),
    "best_of": (2, "x"),
    "suffix": ("x", 5),
}
_CHAT: Mapping[str, Sequence[Any]] = {
    **_SAMPLING,
    "messages": (
        5,
        {},
        [],
        [5],
        [{}],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "nobody", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{}] * 5000}],
        [{"role": "user", "content": None, "tool_calls": []}],
        [{"role": "assistant", "content": None, "audio": {"id": "a"}}],
        [{"role": "assistant", "content": "a", "x": _NESTED}],
    ),
    "max_completion_tokens": (0, -2, "x", 2**31),
    "logprobs": (5, "x"),
    "top_logprobs": (2, -1, "x"),
    "add_generation_prompt": (5, "yes"),
    "continue_final_message": (5, "content"),
    "chat_template_kwargs": (5, [], {"messages": []}, {"tokenize": True}, {"bos_token": "x"}, {"x": _NESTED}),
    "chat_template": ("{{ messages }}",),
}
_WRONG: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Sequence[Any]]]] = {
    "/v1/completions": ({"prompt": "a", "max_tokens": 1}, _COMPLETION),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, _CHAT),
    "/tokenize": ({"prompt": "a"}, {"prompt": (5, [], {}), "messages": _CHAT["messages"], "add_special_tokens": (5,)}),
    "/detokenize": ({"tokens": [5]}, {"tokens": (5, "x", ["a"], [-1], [_MANY], [1.5], [None])}),
}
_OTHER_PATHS = ("/v1", "/v2/completions", "/v1/completions/x", "/../../etc/passwd", "/%00", "/v1/models/none", "/docs")
_OTHER_METHODS = (("GET", "/v1/completions"), ("PUT", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health"))


@dataclass(frozen=True)
class BadRequest:
    """A request as bytes, and what is wrong with it."""

    what: str
    data: bytes


def draw(generator: random.Random) -> BadRequest:
    """One by chance."""
    (kind,) = generator.choices(_KINDS, weights=_WEIGHTS)
    return kind(generator)


async def send(url: str, request: BadRequest) -> str:
    """Send one over a connection of its own; "" where it is refused as it should be, else what is wrong."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    answer = b""
    try:
        with contextlib.suppress(ConnectionError):  # it may answer, and close, before it has read everything
            writer.write(request.data)
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            while part := await asyncio.wait_for(reader.read(2**16), _ANSWER_S):
                answer += part
    except asyncio.TimeoutError:
        return f"{request.what}: no answer within {_ANSWER_S:.0f} s"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return _problem(request, answer)


def _problem(request: BadRequest, answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    shown = f"{request.what}: {request.data[:300]!r} got {answer[:300]!r}"
    if not status or not status[0].startswith(b"4"):
        return shown
    try:
        told = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return shown
    return "" if told else shown


def _http(method: str, path: str, body: bytes, **headers: str) -> bytes:
    named = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _wrong_value(generator: random.Random) -> BadRequest:
    path = generator.choice(list(_WRONG))
    good, wrong = _WRONG[path]
    name = generator.choice(list(wrong))
    body = dict(good)
    body[name] = generator.choice(wrong[name])
    for other in generator.sample(list(wrong), min(len(wrong), generator.randint(0, 2))):
        body.setdefault(other, generator.choice(wrong[other]))
    return BadRequest(f"{path} {name}={body[name]!r:.60}", _http("POST", path, json.dumps(body).encode()))


def _unknown_field(generator: random.Random) -> BadRequest:
    path = generator.choice(list(_WRONG))
    name = "".join(generator.choices("abcdefg_. é\x00\n", k=generator.randint(1, 300)))
    body = dict(_WRONG[path][0]) | {name: generator.choice([1, "x", {}, [1]])}
    return BadRequest(f"{path} with an unknown field", _http("POST", path, json.dumps(body).encode()))


def _broken_body(generator: random.Random) -> BadRequest:
    path = generator.choice(list(_WRONG))
    good = json.dumps(_WRONG[path][0]).encode()
    depth = generator.choice([10, 1000, 100_000])
    body = generator.choice(
        [
            good[: generator.randrange(len(good))],
            good + b"}",
            generator.randbytes(generator.randint(1, 2000)),
            b"",
            b"null",
            b"[]",
            b'"text"',
            b"9" * 10_000,
            b'{"max_tokens": ' + b"9" * 10_000 + b"}",
            b"[" * depth + b"]" * depth,
            b'{"prompt":' * depth + b"1" + b"}" * depth,
            b"\xef\xbb\xbf" + good[1:],
        ]
    )
    return BadRequest(f"{path} with a broken body", _http("POST", path, body))


def _elsewhere(generator: random.Random) -> BadRequest:
    if generator.random() < 0.5:
        method, path = generator.choice(_OTHER_METHODS)
        return BadRequest(f"{method} {path}", _http(method, path, b"{}"))
    path = generator.choice([*_OTHER_PATHS, "/" + "a" * generator.randint(1, 20_000)])
    return BadRequest(f"GET {path:.50}", _http("GET", path, b""))


def _wrong_headers(generator: random.Random) -> BadRequest:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    what, headers = generator.choice(
        [
            ("another content type", {"content_type": generator.choice(["text/plain", "", "application/xml", "é"])}),
            ("another host", {"host": generator.choice(["example.org", "127.0.0.1.example.org", "a" * 500])}),
            ("too many headers", {f"x-{number}": "1" for number in range(generator.randint(101, 400))}),
            ("large headers", {"x-large": "a" * generator.randint(2**16, 2**17 - 2000)}),
        ]
    )
    return BadRequest(what, _http("POST", "/v1/completions", body, **headers))


def _too_large(generator: random.Random) -> BadRequest:
    body = b" " * (8 * 2**20 + generator.randint(1, 1000))
    return BadRequest("a body that is too large", _http("POST", "/v1/completions", body))


def _broken_http(generator: random.Random) -> BadRequest:
    good = _http("POST", "/v1/completions", b"{}")
    data = generator.choice(
        [
            generator.randbytes(generator.randint(1, 500)) + b"\r\n\r\n",
            good.replace(b"HTTP/1.1", b"HTTP/9.9"),
            good.replace(b"host: 127.0.0.1\r\n", b""),
            good.replace(b"content-length: 2", b"content-length: " + generator.choice([b"-2", b"x", b"2, 3"])),
            good.replace(b"connection: close", b"content-length: 7"),
            good.replace(b"connection: close", b"transfer-encoding: gzip"),
            good.replace(b"POST /", b"POST  /"),
            good.replace(b"host: ", b"host : "),
            good.replace(b"connection", b"conn\x00ection"),
            _http("POST", "/v1/completions", b"{}", x_large="a" * 2**18),
        ]
    )
    return BadRequest("broken HTTP", data)


_KINDS: Sequence[Callable[[random.Random], BadRequest]] = (
    _wrong_value,
    _unknown_field,
    _broken_body,
    _elsewhere,
    _wrong_headers,
    _too_large,
    _broken_http,
)
_WEIGHTS = (60, 5, 15, 5, 6, 0.3, 10)
