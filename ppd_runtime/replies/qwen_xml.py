"""Qwen3-Coder's format: a call and each of its arguments between tags of their own."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from ppd_runtime.replies.reader import Reader, Reading, Thinking

_END_OF_NAME = ">"


class QwenXml(Reader):
    """`<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>`.

    An argument's text is a string if the tool's schema says so, or if it is no JSON.

    Args:
        thinking: see `Reader`.
        tools: each tool's schema of its arguments, by name.
        parallel: see `Reader`.
    """

    markers: ClassVar[Sequence[str]] = ("<tool_call>", "</tool_call>")
    end_of_call: ClassVar[str | None] = "</tool_call>"

    def __init__(
        self,
        thinking: Thinking | None = None,
        tools: Mapping[str, Any] | Collection[str] = frozenset(),
        parallel: bool = True,
    ) -> None:
        self._schemas = tools if isinstance(tools, Mapping) else {}
        super().__init__(thinking, tools, parallel)

    def _answer(self) -> Reading:
        begin, end = self.markers
        while marker := (yield from self._until((begin, "<function="), self._content)):
            self._begin_attempt(marker)
            yield from self._white_space()
            if marker == begin and not (yield from self._begins_with("<function=")):
                self._give_up()
                continue
            yield from self._function()
            yield from self._white_space()
            yield from self._begins_with(end)

    def _function(self) -> Reading:
        pieces: list[str] = []
        yield from self._until((_END_OF_NAME,), pieces.append)
        name = "".join(pieces).strip()
        if not name:
            self._give_up()
            return
        self._call(name)
        before = "{"
        while (yield from self._until(("<parameter=", "</function>"), _drop)) == "<parameter=":
            pieces = []
            yield from self._until((_END_OF_NAME,), pieces.append)
            argument = "".join(pieces).strip()
            self._arguments(f"{before}{_as_json(argument)}: ")
            yield from self._value(name, argument)
            before = ", "
        if not self._over or self._text:
            self._arguments("{}" if before == "{" else "}")

    def _value(self, tool: str, argument: str) -> Reading:
        """An argument between its tags, without the line ends that are next to them."""
        yield from self._begins_with("\n")
        pieces: list[str] = []
        yield from self._until(("</parameter>",), pieces.append)
        text = "".join(pieces).removesuffix("\n")
        self._arguments(text if self._is_json(tool, argument, text) else _as_json(text))

    def _is_json(self, tool: str, argument: str, text: str) -> bool:
        schema = self._schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        of_argument = properties.get(argument) if isinstance(properties, Mapping) else None
        kind = of_argument.get("type") if isinstance(of_argument, Mapping) else None
        if kind == "string":
            return False
        try:
            json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return False
        return True


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _drop(_: str) -> None:
    """Between two arguments there are only line ends."""
