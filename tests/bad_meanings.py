"""Requests whose JSON is as it should be and whose meaning is not: forms of texts, tools and histories of chats."""

import json
import random
from typing import Any

from random_schemas import random_schema

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
SAID = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "found"},
]


def deep(levels: int, inner: Any = 1) -> Any:
    """A value in so many levels of objects and lists."""
    for number in range(levels):
        inner = [inner] if number % 2 else {"a": inner}
    return inner


_LOOPS = (
    "start: start",
    "start: a\na: b\nb: a",
    'start: start "a" | start',
    "start: (start*)*",
    'start: "a"*',
    "start: /(a*)*/",
)
_FAULTY = (
    "start:",
    "",
    "%",
    "start: x",
    'start: "a',
    "a: b",
    "start: /[/",
    "%import x",
    "start: %json {",
    "x" * 70_000,
)
_EXPLODE = (
    "(a+)+$", "(a|a)*b", "(.*){500}", "(x{1,500}){1,500}", "((a{0,99}){0,99}){0,99}", "(?=a)b", "\\1", "[", "(" * 5000,
    "a{99999}", "(?:.{0,400}a){400}", "\\p{L}{400}", "[^" + "a" * 9000 + "]{300}", "(?i)" + "é" * 500, "",
)  # fmt: skip
"""Regular expressions that are large, have no end, or are none."""


def _schemas(rng: random.Random) -> Any:
    """Schemas that are too deep, too large, loop, contradict themselves, or are none."""
    wide = {
        f"p{number}": {"type": "string", "pattern": f"^x{{{number}}}$"} for number in range(rng.choice([50, 400, 3000]))
    }
    nested: Any = {"type": "object"}
    for _ in range(rng.choice([20, 61, 62, 63, 70, 300])):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"], "additionalProperties": False}
    return rng.choice(
        (
            {"type": "object", "properties": wide, "required": [*wide]},
            nested,
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"enum": []},
            {"type": "string", "pattern": rng.choice(_EXPLODE)},
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"type": "string", "maxLength": 10**9},
            {"type": "integer", "minimum": 10**40, "maximum": -1},
            {"type": "number", "multipleOf": 0},
            {"type": "array", "minItems": 10**6, "items": {"type": "null"}},
            {"type": "array", "prefixItems": [{"type": "integer"}] * 3000},
            {"$ref": "http://127.0.0.1:1/x"},
            {"type": "nothing"},
            {"type": ["string", 5]},
            {"properties": [1]},
            {"not": {}},
            {"oneOf": [{"type": "object", "properties": wide}] * 3},
            random_schema(rng),
        )
    )


def hard_forms(rng: random.Random) -> dict[str, Any]:
    """A field that says what the text has to look like, and should not."""
    return rng.choice(
        (
            {"guided_json": _schemas(rng)},
            {"guided_json": json.dumps(_schemas(rng))[: rng.randint(0, 300)]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _schemas(rng)}}},
            {"guided_regex": rng.choice(_EXPLODE)},
            {"structured_outputs": {"regex": rng.choice(_EXPLODE)}},
            {"guided_grammar": rng.choice(_LOOPS + _FAULTY)},
            {"structured_outputs": {"grammar": rng.choice(_LOOPS + _FAULTY)}},
            {
                "guided_choice": rng.choice(
                    ([], [""], ["a", "a"], ["x" * 70_000], ["a"] * 1001, [str(n) for n in range(999)])
                )
            },
        )
    )


def bad_tools(rng: random.Random) -> dict[str, Any]:
    """Tools without names, of equal names, of unknown kinds, with schemas that fail; choices of none of them."""
    function: dict[str, Any] = {"name": "find", "parameters": _schemas(rng)}
    tools = rng.choice(
        (
            [{"type": "function"}],
            [{"type": "function", "function": {}}],
            [{"type": "function", "function": {"name": ""}}],
            [{"type": "function", "function": {"name": "a b"}}],
            [{"type": "function", "function": {"name": 5}}],
            [TOOL, TOOL],
            [{"type": "web_search"}],
            [{}],
            [TOOL] * 513,
            [{"type": "function", "function": function}],
            [{"type": "function", "function": {**function, "strict": rng.choice([5, "yes", True])}}],
        )
    )
    choice = rng.choice(
        ("auto", "none", "required", "find", "nobody", {"type": "function", "function": {"name": "nobody"}}, {}, 5)
    )
    return {"tools": tools, "tool_choice": choice}


def bad_history(rng: random.Random) -> dict[str, Any]:
    """Results of calls that nobody made, calls that name no function, roles in odd orders, odd contents."""
    result = {"role": "tool", "tool_call_id": rng.choice(["call_1", "call_2", None, 5, ""]), "content": "x"}
    calls = rng.choice(
        ([{}], [{"function": {}}], [{"function": {"name": "f", "arguments": 5}}], "call", [5], [_CALL, _CALL])
    )
    return {
        "messages": rng.choice(
            (
                [result],
                [SAID[1], result],
                [SAID[1], {"role": "assistant", "content": None, "tool_calls": calls}, result],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                [{"role": "user"}],
                [{"role": "nobody", "content": "x"}],
                [{"role": "assistant", "content": None}],
                [SAID[1]] * rng.choice([2, 400, 10_001]),
                [{"role": "user", "content": "x", "tool_calls": deep(rng.choice([10, 63, 64, 200]))}],
            )
        )
    }
