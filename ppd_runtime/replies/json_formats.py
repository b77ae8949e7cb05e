"""Formats whose calls are JSON objects: Hermes' and Qwen's, Llama 3's, Mistral's."""

import secrets
import string
from collections.abc import Sequence
from typing import ClassVar

from ppd_runtime.replies.reader import Reader, Reading

_MISTRALS_ID = string.ascii_letters + string.digits


class Hermes(Reader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call."""

    markers: ClassVar[Sequence[str]] = ("<tool_call>", "</tool_call>")
    end_of_call: ClassVar[str | None] = "</tool_call>"

    def _answer(self) -> Reading:
        begin, end = self.markers
        while (yield from self._until((begin,), self._content)):
            self._begin_attempt(begin)
            if (yield from self._call_object()):
                yield from self._until((end,), _drop)
            else:
                self._give_up()


class Llama3(Reader):
    """`{"name": …, "parameters": {…}}` alone, perhaps behind `<|python_tag|>`; several are separated by `;`.

    The objects have no marks of their own, so an object that names no tool of the request is an answer in JSON.
    """

    markers: ClassVar[Sequence[str]] = ("<|python_tag|>",)

    def _answer(self) -> Reading:
        self._begin_attempt()
        yield from self._white_space()
        yield from self._begins_with(self.markers[0])
        yield from self._white_space()
        while self._text.startswith("{"):
            if not (yield from self._call_object(only_known=True)):
                break
            self._begin_attempt()
            yield from self._white_space()
            if (yield from self._begins_with(";")) or (yield from self._begins_with(",")):
                yield from self._white_space()
        self._give_up()
        yield from self._until((), self._content)


class Mistral(Reader):
    """`[TOOL_CALLS]` before a list of objects; later models write it before each name, `[ARGS]` before arguments."""

    markers: ClassVar[Sequence[str]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")

    def _answer(self) -> Reading:
        begin, *_ = self.markers
        marker = yield from self._until((begin,), self._content)
        while marker:
            self._begin_attempt(begin)
            yield from self._white_space()
            if self._text.startswith(("[", "{")):
                yield from self._list()
            else:
                yield from self._named_call()
            marker = yield from self._until((begin,), self._content)

    def _list(self) -> Reading:
        yield from self._begins_with("[")
        while (yield from self._call_object()):
            self._begin_attempt()
            yield from self._white_space()
            if not (yield from self._begins_with(",")):
                yield from self._begins_with("]")
                return
        self._give_up()

    def _named_call(self) -> Reading:
        name: list[str] = []
        found = yield from self._until(("[ARGS]", "[CALL_ID]", "{"), name.append)
        if found == "[CALL_ID]":
            found = yield from self._until(("[ARGS]", "{"), _drop)
        called = "".join(name).strip()
        if not called or found is None:
            self._give_up()
            return
        self._call(called)
        if found == "{":
            self._text = found + self._text
        else:
            yield from self._white_space()
        yield from self._json_value(self._arguments)

    def _new_id(self) -> str:
        return "".join(secrets.choice(_MISTRALS_ID) for _ in range(9))  # as its templates require


def _drop(_: str) -> None:
    """What is between two calls is white space, or has no meaning."""
