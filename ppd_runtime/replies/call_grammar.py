"""The grammar of replies that have to be calls, in each family's form, or have a form of their own behind thinking."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ppd_runtime.replies.reader import Thinking
from ppd_runtime.sampling.grammar import WHITESPACE, Form, check_multiples

Special = Mapping[str, int]
"""Ids of the tokenizer's special tokens, which a grammar names by their ids."""
LATER_MISTRAL = "mistral_args"
"""The form in which Mistral's later models write a name, `[ARGS]` and an object."""
_MOST_CALLS = 16
"""Calls of one reply: a small model would not leave off."""
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As templates write JSON."""
_FREE_STRING = {"type", "title", "description", "default", "examples"}
"""What a string's schema may say if any text obeys it."""

_PUT_TOGETHER = {"$ref", "allOf", "anyOf", "oneOf"}
_BESIDE_REFERENCES = {"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title", "description"}
_MOST_REFERENCES = 20
_LONE_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_LINE_END = r'"\n"'


def call_grammar(
    form: str,
    schemas: Mapping[str, Mapping[str, Any]],
    several: bool,
    thinking: Thinking | None,
    special: Special,
    text: Form | None = None,
) -> str:
    """A grammar in Lark's syntax, as llguidance takes it, of the replies that are calls and nothing else but thinking.

    Args:
        form: the name of the form of calls; `LATER_MISTRAL` is Mistral's later one.
        schemas: the schema of the arguments of each tool that may be called, by name.
        several: whether more than one call may be made.
        thinking: how the model marks its thinking, which may come first; None if it does not think.
        special: see `Special`.
        text: the form of replies that are no calls; None: there are none.

    Raises:
        ValueError: for arguments that the form cannot keep to their schema, and as `thought_then`.
    """
    looked_up = {name: _looked_up(schema) for name, schema in schemas.items()}
    check_multiples("tools", list(looked_up.values()))
    return _Grammar(special).of(form, looked_up, several, thinking, None if text is None else _body(text))


def thought_then(form: Form, thinking: Thinking, special: Special) -> str:
    """The grammar of replies that have a form, behind thinking.

    Raises:
        ValueError: for a grammar, which cannot be part of another one.
    """
    return _Grammar(special).behind_thinking(_body(form), thinking)


def _body(form: Form) -> str:
    """A form as the body of a rule."""
    if form.setting == "schema":
        style = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return f"%json {json.dumps({**json.loads(form.text), **style})}"
    if form.setting == "regex":
        return f"/{_LONE_SLASH.sub(_escaped, form.text)}/".replace("\n", r"\n")
    if form.setting == "choice":
        return " | ".join(map(_text, json.loads(form.text)))
    raise ValueError(
        "grammar: the model thinks first, and a grammar leaves no room for that: give a schema, a regex or a "
        "choice, or let the grammar begin with the thinking and set reasoning_parser='none'"
    )


class _Grammar:
    """Rules by name, in the making."""

    def __init__(self, special: Special) -> None:
        self._special = special
        self._rules: list[str] = []

    def of(
        self,
        form: str,
        schemas: Mapping[str, Mapping[str, Any]],
        several: bool,
        thinking: Thinking | None,
        text: str | None,
    ) -> str:
        """See `call_grammar`; `text` is the body of a rule."""
        makers: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
            "hermes": self._hermes,
            "qwen3_coder": self._qwen,
            "llama3_json": lambda name, schema: self._object(name, "parameters", schema),
            "gemma": lambda name, schema: self._object(name, "parameters", schema),
            "mistral": lambda name, schema: self._object(name, "arguments", schema),
            LATER_MISTRAL: self._mistral_args,
            "gpt_oss": self._gpt_oss,
        }
        calls = [self._rule("call", makers[form](name, schema)) for name, schema in schemas.items()]
        call = self._rule("any", " | ".join(calls))
        more = f" ({self._between(form)} {call}){{0,{_MOST_CALLS - 1}}}" if several and form != "gpt_oss" else ""
        begins, ends = (
            (f"{self._mark('[TOOL_CALLS]')} {_text('[')} ", f" {_text(']')}") if form == "mistral" else ("", "")
        )
        reply = f"{begins}{call}{more}{ends}"
        if text is not None:
            reply = f"({reply} | {self._rule('form', text)})"
        start = f"start: {self._thought(form, thinking)}{reply}"
        return "\n".join([start, *self._rules]) + "\n"

    def behind_thinking(self, body: str, thinking: Thinking) -> str:
        """See `thought_then`."""
        start = f"start: {self._thought('', thinking)}{self._rule('form', body)}"
        return "\n".join([start, *self._rules]) + "\n"

    def _rule(self, kind: str, body: str, options: str = "") -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _mark(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _text(text)

    def _marked(self, text: str) -> str:
        """A text in which special tokens stand for themselves."""
        for mark in self._special:
            if mark in text:
                before, after = text.split(mark, 1)
                parts = (self._marked(before), self._mark(mark), self._marked(after))
                return " ".join(part for part in parts if part)
        return _text(text) if text else ""

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule("json", f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")

    def _object(self, name: str, arguments: str, schema: Mapping[str, Any]) -> str:
        begin = f'{{"name": {json.dumps(name)}, "{arguments}": '
        return f"{_text(begin)} {self._json(_closed(schema))} {_text('}')}"

    def _hermes(self, name: str, schema: Mapping[str, Any]) -> str:
        called = self._object(name, "arguments", schema)
        return (
            f"{self._marked('<tool_call>')} {_text(chr(10))} {called} {_text(chr(10))} {self._marked('</tool_call>')}"
        )

    def _mistral_args(self, name: str, schema: Mapping[str, Any]) -> str:
        return f"{self._mark('[TOOL_CALLS]')} {_text(name)} {self._mark('[ARGS]')} {self._json(_closed(schema))}"

    def _gpt_oss(self, name: str, schema: Mapping[str, Any]) -> str:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return f"{self._marked(header)} {self._json(_closed(schema))}"

    def _qwen(self, name: str, schema: Mapping[str, Any]) -> str:
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            raise ValueError(f"tools: {name!r} has properties that are no object, or a required that is no list")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        body = [self._marked("<tool_call>"), _text(f"\n<function={name}>\n")]
        for argument, given in properties.items():
            value = self._rule("value", self._argument(name, argument, given, shared))
            body.append(value if argument in required else f"{value}?")
        return " ".join([*body, _text("</function>\n"), self._marked("</tool_call>")])

    def _argument(self, name: str, argument: str, schema: Any, shared: Mapping[str, Any]) -> str:
        begin, end = f"<parameter={argument}>\n", "\n</parameter>\n"
        if not isinstance(schema, Mapping) or schema.get("type") != "string":
            schema = schema if isinstance(schema, Mapping) else {}
            return f"{_text(begin)} {self._json({**shared, **schema})} {_text(end)}"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list | tuple) and values:
            return f"{_text(begin)} ({' | '.join(_text(str(value)) for value in values)}) {_text(end)}"
        if further := set(schema) - _FREE_STRING:
            raise ValueError(
                f"tool_choice: a call of {name!r} cannot be required: its text {argument!r} has {min(further)!r}, "
                "which this model's form of calls cannot keep to; leave it out"
            )
        return f"{_text(begin)} {self._rule('text', _until(end), '[lazy]')}"

    def _between(self, form: str) -> str:
        separators = {"llama3_json": "; ", "gemma": ", ", "mistral": ", ", LATER_MISTRAL: ""}
        return _text(separators.get(form, "\n"))

    def _thought(self, form: str, thinking: Thinking | None) -> str:
        """What may come before the calls: thinking, which the prompt may have opened."""
        if thinking is None:
            return ""
        close = self._special.get(thinking.closes)
        body = self._rule("thought", _until(thinking.closes), "[lazy]") if close is None else f"ANY <[{close}]>"
        if close is not None:
            self._rules.append("ANY: /(.|\\n)*/")
        follows = self._marked("<|start|>assistant") if form == "gpt_oss" else "/\\s{0,2}/"
        if thinking.is_open:
            return f"{body} {follows} "
        return f"({self._marked(thinking.opens)} {body} {follows})? "


def _text(text: str) -> str:
    return json.dumps(text)


def _escaped(found: re.Match[str]) -> str:
    return found[1] or r"\/"


def _until(end: str) -> str:
    """An expression of the shortest text that ends with `end`."""
    escaped = "".join(f"\\x{{{ord(character):x}}}" for character in end)
    return f"/(.|\\n)*{escaped}/"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments; if it does not say whether there may be others, there are none.

    One that is put together of others says elsewhere which there are.
    """
    if _PUT_TOGETHER & schema.keys():
        return {"type": "object", **schema}
    return {"type": "object", "properties": {}, "additionalProperties": False, **schema}


def _looked_up(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema whose root refers to one of its own definitions as what stands there; any other as it is."""
    for _ in range(_MOST_REFERENCES):
        place = schema.get("$ref")
        if not isinstance(place, str) or not place.startswith("#/") or schema.keys() - _BESIDE_REFERENCES:
            break
        found: Any = schema
        for part in place.removeprefix("#/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            break
        schema = {**{name: value for name, value in schema.items() if name != "$ref"}, **found}
    return schema
