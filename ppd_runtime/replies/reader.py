"""Reads a reply while it is decoded: thinking, then text and calls; each family's format is a subclass."""

import json
import re
import uuid
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ppd_runtime.replies.json_scan import ValueScan
from ppd_runtime.replies.message import Arguments, CallBegins, Content, Delta, Thought
from ppd_runtime.text import overlap

Reading: TypeAlias = Generator[None, None, Any]
"""A part of a reader that waits for more text at each `yield`, and returns what it found."""
Tell: TypeAlias = Callable[[str], object]
_SPACE = re.compile(r"\s*")


class Thinking(NamedTuple):
    """How a model marks its thinking."""

    opens: str
    closes: str
    is_open: bool = False
    """Whether the prompt opened it already."""


class Reader:
    """One reply's text in, its parts out, as soon as they are certain.

    Args:
        thinking: the marks around the model's thinking; None: it is not looked for.
        tools: names of the tools that may be called.
        parallel: whether more than one call is told.
    """

    markers: ClassVar[Sequence[str]] = ()
    """Texts that may be special tokens; the reader has to see them as they are written."""
    end_of_call: ClassVar[str | None] = None
    """What the model writes behind a call: a stop text where one call is wanted."""

    def __init__(
        self, thinking: Thinking | None = None, tools: Collection[str] = frozenset(), parallel: bool = True
    ) -> None:
        self._thinking, self._tools, self._parallel = thinking, tools, parallel
        self._text, self._over = "", False
        """Text that is not read yet, and whether no more comes."""
        self._deltas: list[Delta] = []
        self._taken: list[str] = []
        """What was read since `_begin_attempt`, to be given as text if it is no call."""
        self._calls = 0
        self._space = ""
        """White space whose part of the reply depends on what follows it."""
        self._has_content = False
        self._run = self._read()
        next(self._run)

    def push(self, text: str) -> list[Delta]:
        """Add text; what became certain."""
        self._text += text
        next(self._run, None)
        return self._told()

    def finish(self) -> list[Delta]:
        """What is left at the end of the text."""
        self._over = True
        next(self._run, None)
        if self._space and not self._calls:
            self._deltas.append(Content(self._space))
        return self._told()

    def _told(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> Reading:
        yield
        if self._thinking is not None:
            yield from self._think(self._thinking)
        yield from self._answer()

    def _answer(self) -> Reading:
        """Read what follows the thinking; formats override it."""
        yield from self._until((), self._content)

    def _think(self, marks: Thinking) -> Reading:
        if not marks.is_open:
            before = yield from self._white_space()
            if not (yield from self._begins_with(marks.opens)):
                self._content(before)
                return
        yield from self._white_space()
        yield from self._until((marks.closes,), self._thought)
        self._space = ""
        yield from self._white_space()

    # What is told

    def _thought(self, text: str) -> None:
        self._tell_but_space(text, Thought)

    def _content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._tell_but_space(text, Content)

    def _tell_but_space(self, text: str, kind: type[Thought] | type[Content]) -> None:
        text = self._space + text
        told = text.rstrip()
        self._space = text[len(told) :]
        if told:
            self._deltas.append(kind(told))

    def _call(self, name: str) -> None:
        self._space, self._taken = "", []
        self._calls += 1
        if self._is_told:
            self._deltas.append(CallBegins(self._new_id(), name))

    def _arguments(self, text: str) -> None:
        if text and self._is_told:
            self._deltas.append(Arguments(text))

    @property
    def _is_told(self) -> bool:
        return self._parallel or self._calls == 1

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    # How text is read

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        self._taken.append(taken)
        return taken

    def _begin_attempt(self, marker: str = "") -> None:
        """Remember what is read from here on, after a marker that was read."""
        self._taken = [marker]

    def _give_up(self) -> None:
        """What looked like a call is none: it is text."""
        self._content("".join(self._taken))
        self._taken = []

    def _until(self, markers: Sequence[str], tell: Tell) -> Reading:
        """Tell the text before the first of `markers`; returns it, or None if the text ends before one."""
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self._text.find(marker)) >= 0]
            if found:
                at, _, marker = min(found)
                tell(self._take(at))
                self._take(len(marker))
                return marker
            size = len(self._text) - (0 if self._over else overlap(self._text, markers))
            tell(self._take(size))
            if self._over:
                return None
            yield

    def _white_space(self) -> Reading:
        """Read white space, and return it; text follows, or nothing."""
        space = ""
        while True:
            match = _SPACE.match(self._text)
            space += self._take(match.end() if match else 0)
            if self._text or self._over:
                return space
            yield

    def _begins_with(self, expected: str) -> Reading:
        """Read `expected` if it is next; returns whether it was."""
        while True:
            if self._text.startswith(expected):
                self._take(len(expected))
                return True
            if self._over or not expected.startswith(self._text):
                return False
            yield

    def _json_value(self, tell: Tell) -> Reading:
        """Tell the text of the JSON value that is next; returns whether it is whole."""
        scan = ValueScan()
        while True:
            tell(self._take(scan.push(self._text)))
            if scan.is_whole or self._over:
                return scan.is_whole
            yield

    def _whole_value(self) -> Reading:
        """The JSON value that is next; `_json_value`'s text as Python has it. Raises ValueError if it is none."""
        pieces: list[str] = []
        yield from self._json_value(pieces.append)
        return _loaded("".join(pieces))

    def _call_object(self, only_known: bool = False) -> Reading:
        """Read a call that is a JSON object with a name and arguments; returns whether it was one, whole or not.

        `only_known`: an object that names no tool of the request is none.
        """
        before = self._calls
        try:
            return (yield from self._members(only_known))
        except ValueError:
            return self._calls > before

    def _members(self, only_known: bool) -> Reading:
        name, waiting, has_arguments = None, "", False
        yield from self._expect("{")
        while True:
            yield from self._white_space()
            if (yield from self._begins_with("}")):
                break
            if (yield from self._begins_with(",")):
                continue
            key = yield from self._whole_value()
            yield from self._expect(":")
            yield from self._white_space()
            if key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                if name is not None and self._text.startswith("{"):
                    yield from self._json_value(self._arguments)
                else:
                    waiting = _as_object((yield from self._whole_value()))
                    if name is not None:
                        self._arguments(waiting)
            else:
                value = yield from self._whole_value()
                if key in ("name", "function") and name is None and isinstance(value, str):
                    name = self._named(value, only_known)
                    self._arguments(waiting)
        if name is not None and not has_arguments:
            self._arguments("{}")
        return name is not None

    def _named(self, name: str, only_known: bool) -> str:
        if only_known and name not in self._tools:
            raise ValueError(f"{name!r} is no tool")
        self._call(name)
        return name

    def _expect(self, expected: str) -> Reading:
        yield from self._white_space()
        if not (yield from self._begins_with(expected)):
            raise ValueError(f"no {expected!r}")


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too many levels") from error


def _as_object(value: Any) -> str:
    """Arguments as JSON text; some models write them as such a text, or as null."""
    if isinstance(value, str):
        return value
    return "{}" if value is None else json.dumps(value, ensure_ascii=False)
