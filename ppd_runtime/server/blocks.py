"""A reply as blocks one after the other: thinking, text, calls. Responses and messages are made of them."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ppd_runtime.replies.message import CallBegins, Content, Delta, Thought
from ppd_runtime.replies.reading import ReplyReading

Kind = Literal["thought", "text", "call"]


@dataclass
class Block:
    """A part of a reply."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    """The tool that a call names."""
    text: str = ""
    """What has come of it: a call's arguments, as JSON text."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Step(NamedTuple):
    """What happened to a block: it began, it has `text` more, or it ended."""

    what: Literal["began", "grew", "ended"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one reply, while it is decoded. Without a reading all of it is text."""

    def __init__(self, reading: ReplyReading | None) -> None:
        self._reader = None if reading is None else reading.open()
        self.all: list[Block] = []
        self._size = 0

    def push(self, text: str) -> list[Step]:
        """Add text; what happened."""
        self._size += len(text)
        return self._steps(self._deltas(text))

    def finish(self, whole: str) -> list[Step]:
        """The last steps, with the rest of the whole text; a reply of nothing is an empty text."""
        deltas = [*self._deltas(whole[self._size :]), *(self._reader.finish() if self._reader else ())]
        steps = self._steps(deltas if deltas or self.all else [Content("")])
        return [*steps, Step("ended", self.all[-1])]

    @property
    def calls(self) -> list[Block]:
        """The calls so far."""
        return [block for block in self.all if block.kind == "call"]

    @property
    def thoughts(self) -> str:
        """What the model thought."""
        return "".join(block.text for block in self.all if block.kind == "thought")

    def _deltas(self, text: str) -> Sequence[Delta]:
        if self._reader is not None:
            return self._reader.push(text)
        return [Content(text)] if text else []

    def _steps(self, deltas: Sequence[Delta]) -> list[Step]:
        steps: list[Step] = []
        for delta in deltas:
            if isinstance(delta, CallBegins):
                steps += self._begin("call", delta.id, delta.name)
                continue
            kind: Kind = "thought" if isinstance(delta, Thought) else "text" if isinstance(delta, Content) else "call"
            if not self.all or self.all[-1].kind != kind:
                steps += self._begin(kind)
            if delta.text:
                self.all[-1].text += delta.text
                steps.append(Step("grew", self.all[-1], delta.text))
        return steps

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[Step]:
        ended = [Step("ended", self.all[-1])] if self.all else []
        self.all.append(Block(len(self.all), kind, call_id, name))
        return [*ended, Step("began", self.all[-1])]
