"""Requests that no client should send: valid ones that are mutated, nonsense in JSON and in HTTP, half-sent ones."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from bad_meanings import SAID, TOOL, bad_history, bad_tools, deep, hard_forms


class Bad(NamedTuple):
    """One request, as its bytes."""

    kind: str
    """What is wrong with it; the first word is the mutation's name."""
    sent: bytes
    path: str
    fields: tuple[str, ...] = ()
    """One of these is what a refusal has to name; empty: any or none."""
    is_whole: bool = True
    """Whether it is a whole request of HTTP, which gets an answer."""
    leaves: bool = False
    """Whether the client goes away without reading the answer."""


_ITEM_TOOL = {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}
_SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}, "required": ["name"]}
_SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
VALID: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": "import os", "max_tokens": 2, "logprobs": 1, "stop": ["\n\n"], **_SAMPLED, "top_k": 5, "min_p": 0.1,
         "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logit_bias": {"5": 1}, "presence_penalty": 0.5, "echo": True},
        {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 2, "stream": True, "ppd": {"timeline": True}, "stop_token_ids": [5]},
        {"model": "demo", "prompt": "a", "max_tokens": 2, "guided_regex": "[a-c]{1,3}"},
        {"prompt": "a", "max_tokens": 2, "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "a", "max_tokens": 2, "guided_grammar": 'start: "a" | "b"'},
    ),
    "/v1/chat/completions": (
        {"messages": SAID, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto", **_SAMPLED},
        {"messages": SAID[:2], "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 2, "stream": True},
        {"messages": SAID[:2], "max_tokens": 2, "tools": [TOOL], "tool_choice": "required"},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
            "chat_template_kwargs": {"thinks": True},
        },
    ),
    "/v1/responses": (
        {"input": "Hello", "instructions": "You help.", "max_output_tokens": 2, **_SAMPLED},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Find it."}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "found"},
            ],
            "tools": [_ITEM_TOOL],
            "max_output_tokens": 2,
            "stream": True,
        },
        {
            "input": "Hello",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}},
        },
    ),
    "/v1/messages": (
        {"messages": [SAID[1]], "max_tokens": 2, "system": "You help.", "stop_sequences": ["x"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Find it."}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "found"}]},
            ],
            "max_tokens": 2,
            "tools": [{"name": "find", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": True,
        },
    ),
    "/v1/messages/count_tokens": (
        {"messages": [{"role": "user", "content": "Hello"}], "system": [{"type": "text", "text": "You help."}]},
    ),
    "/tokenize": ({"prompt": "a b"}, {"messages": SAID[:2], "add_generation_prompt": True}),
    "/detokenize": ({"tokens": [5, 6, 7]},),
}  # fmt: skip
"""Bodies that are answered, by path, each of which is mutated."""


_MOST_LEVELS = 8  # of what is mutated further
ODD = tuple(
    json.dumps(value)
    for value in (
        None, True, False, 0, 1, -1, -(2**31), 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-308, float("nan"),
        float("inf"), -float("inf"), "", " ", "\0", "a", "auto", "required", "5", "é\u2028", "\ud800", "\U0010ffff",
        "x" * 5000, [], {}, [[]], [{}], [None], ["", ""], {"": ""}, {"type": "text"}, {"type": "image_url"},
        {"a": None}, [1, "a", None], [-1], [10**9], [True], {"$ref": "#"}, {"type": "function"}, list(range(300)),
        ["a"] * 2000, {str(number): number for number in range(300)}, deep(30), deep(100), deep(400),
    )
)  # fmt: skip
"""What a field may hold instead of its value, as JSON."""


def _places(body: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each value within a JSON value."""
    parts = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, part in parts if len(place) < _MOST_LEVELS else ():
        yield (*place, name)
        yield from _places(part, (*place, name))


def _at(body: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        body = body[name]
    return body


def _mutated(rng: random.Random, path: str) -> tuple[str, Any, tuple[str, ...]]:
    """A valid body with one to three of its values changed: what was done, the body, the fields that it was done to."""
    body = deepcopy(rng.choice(VALID[path]))
    done, fields = [], []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        places = [*_places(body)]
        place = rng.choice(places or [("x",)])
        inside, what = (
            _at(body, place[:-1]),
            rng.choice(("odd", "odd", "odd", "odd", "gone", "wrapped", "unknown", "twice")),
        )
        fields.append(str(place[0]))
        if what == "unknown" and isinstance(inside, dict):
            name = rng.choice(("x", "", "é", "a" * 300, "__proto__", "functions", "best_of", "self", "model_config"))
            inside[name] = json.loads(rng.choice(ODD))
            fields += [name] if len(place) == 1 else []
        elif what == "gone" and place in places:
            del inside[place[-1]]
        elif what == "wrapped":
            inside[place[-1]] = [inside.get(place[-1]) if isinstance(inside, dict) else inside[place[-1]]]
        elif what == "twice" and isinstance(inside, list):
            inside += inside
        else:
            inside[place[-1]] = json.loads(rng.choice(ODD))
        done.append(f"{what} {'.'.join(map(str, place))}")
    return "; ".join(done), body, tuple(fields)


def _with(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    forms = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return {**{name: value for name, value in body.items() if name not in forms}, **more}


def _meant(rng: random.Random) -> tuple[str, str, Any, tuple[str, ...]]:
    """A request whose JSON is as it should be, and whose meaning is not."""
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/chat/completions"))
    makers = (hard_forms,) if path == "/v1/completions" else (hard_forms, bad_tools, bad_history)
    maker = rng.choice(makers)
    more = maker(rng)
    plain = {"prompt": "a"} if path == "/v1/completions" else {"messages": SAID[1:2]}
    body = _with({**plain, "max_tokens": 2, "stream": rng.random() < 0.3}, more)
    return f"{maker.__name__} {json.dumps(more)[:200]}", path, body, tuple(more)


def _encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


_JUNK = (
    b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\0", b"NaN", b"-Infinity", b"1e999", b",", b"}", b"[", b'"', b"\\u",
    b"'", b"//", b"\x1f\x8b\x08", b"9" * 6000, b"[" * 50_000, b'{"a":' * 20_000,
)  # fmt: skip


def _broken(rng: random.Random, body: bytes) -> bytes:
    """JSON with a few bytes of it changed, cut off or put in."""
    place, junk = rng.randrange(len(body) + 1), rng.choice((*_JUNK, bytes([rng.randrange(256)])))
    begins, ends = body[:place], body[place:]
    return rng.choice((begins, begins + junk + ends, begins + junk + ends[1:], junk, body[::-1], b""))


def _head(method: str, path: str, size: int | str, *others: bytes, kind: str = "application/json") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1".encode(),
        b"Host: 127.0.0.1",
        f"Content-Length: {size}".encode(),
        b"Connection: close",
    ]
    return b"\r\n".join([*lines, *([f"Content-Type: {kind}".encode()] if kind else []), *others, b"", b""])


_NOWHERE = (
    "/v1", "/v1/", "/v2/completions", "/v1/completions/", "/v1/models/none", "/v1/models/%00", "/v1/models/..%2f..",
    "/v1/jobs", "/v1/batches", "/v1/files", "/v1/embeddings", "/jobs/1", "//", "/%ff", "/v1/responses/resp_1",
    "/v1/chat", "/?a=b", "/" + "a" * 3000,
)  # fmt: skip
"""Paths that are not there; / takes no POST."""
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "HEAD", "get")


_TYPES = (
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/jsonx",
    "é",
    "a" * 500,
)
_HEADERS = (
    b"X: " + b"y" * 70_000,
    b"\r\n".join([b"X: y"] * 200),
    b"Expect: 100-continue",
    b"Content-Encoding: gzip",
    b"X\0: y",
    b"Authorization: Bearer \xff",
    b"Host: elsewhere.example",
    b"Upgrade: websocket",
)
_CHUNKS = (b"zz\r\n", b"5\r\nab\r\n0\r\n\r\n", b"f" * 18 + b"\r\n", b"0\r\n\r\n")
_NO_HTTP = (b"\x16\x03\x01\x02\0", b"GET\r\n\r\n", b"\r\n\r\n\r\n")


def _in_http(rng: random.Random, path: str, body: bytes) -> Bad:
    """Wrong methods and paths, types and lengths, and what is no HTTP."""
    size, plain = len(body), _head("POST", path, len(body))
    method, other, kind, header = map(rng.choice, (_METHODS, _NOWHERE, _TYPES, _HEADERS))
    length = rng.choice(("-1", "x", str(10**30), "0", str(size // 2), str(size + 5), f"{size}, 5"))
    chunks = rng.choice((*_CHUNKS, b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)))
    in_chunks = plain.replace(b"Content-Length: %d" % size, b"Transfer-Encoding: chunked")
    junk = rng.choice((*_NO_HTTP, rng.randbytes(200), plain.replace(b"HTTP/1.1", b"HTTP/9.9")))
    return rng.choice(
        (
            Bad(f"method {method}", _head(method, path, size) + body, path),
            Bad(f"path {other[:60]}", _head(rng.choice(("POST", "GET")), other, size) + body, other),
            Bad(f"type {kind[:60]}", _head("POST", path, size, kind=kind) + body, path),
            Bad(f"header {header[:40]!r}", _head("POST", path, size, header) + body, path, is_whole=False),
            Bad(f"length {length[:40]}", _head("POST", path, length) + body, path, is_whole=False),
            Bad(f"chunks {chunks[:20]!r}", in_chunks + chunks, path, is_whole=False),
            Bad(f"junk {junk[:20]!r}", junk, path, is_whole=False),
        )
    )


def bad_request(rng: random.Random) -> Bad:
    """A bad request, over all paths."""
    path = rng.choice([*VALID])
    valid = _encoded(rng.choice(VALID[path]))
    what = rng.choices(("mutated", "meant", "broken", "http", "leaves"), (5, 3, 1.5, 1.5, 1))[0]
    if what == "mutated":
        done, body, fields = _mutated(rng, path)
        return _posted(f"mutated {done[:200]}", path, _encoded(body), fields)
    if what == "meant":
        done, path, body, fields = _meant(rng)
        return _posted(done, path, _encoded(body), fields)
    if what == "broken":
        sent = _broken(rng, valid)
        return _posted(f"broken {sent[:60]!r}", path, sent)
    if what == "http":
        return _in_http(rng, path, valid)
    whole = _head("POST", path, len(valid)) + valid
    return Bad("leaves", whole[: rng.randint(0, len(whole))], path, leaves=True)


def _posted(kind: str, path: str, body: bytes, fields: tuple[str, ...] = ()) -> Bad:
    return Bad(kind, _head("POST", path, len(body)) + body, path, fields)
