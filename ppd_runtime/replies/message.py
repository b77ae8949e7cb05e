"""A reply's parts as they are decoded, and the message that they make together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


class Thought(NamedTuple):
    """More of what the model thinks before its answer."""

    text: str


class Content(NamedTuple):
    """More of the answer's text."""

    text: str


class CallBegins(NamedTuple):
    """The model begins to call a tool."""

    id: str
    name: str


class Arguments(NamedTuple):
    """More JSON text of the newest call's arguments."""

    text: str


Delta: TypeAlias = Thought | Content | CallBegins | Arguments


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that the model asks for."""

    id: str
    """Names the call; the tool's result repeats it as `tool_call_id`."""
    name: str
    arguments: str
    """JSON text as the model wrote it: incomplete if the reply was cut short."""

    def to_dict(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class AssistantMessage:
    """A model's reply."""

    content: str | None
    """The text; None if there are calls only."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str | None = None
    """What the model thought; None if its form of thinking is unknown, or it thought nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The message in OpenAI's form, to be the next one of the conversation."""
        calls = {"tool_calls": [call.to_dict() for call in self.tool_calls]} if self.tool_calls else {}
        thought = {} if self.reasoning_content is None else {"reasoning_content": self.reasoning_content}
        return {"role": "assistant", "content": self.content, **thought, **calls}


def message_of(deltas: Iterable[Delta]) -> AssistantMessage:
    """The message that a reply's parts make together."""
    content, thoughts = "", ""
    calls: list[tuple[str, str, str]] = []
    for delta in deltas:
        if isinstance(delta, Content):
            content += delta.text
        elif isinstance(delta, Thought):
            thoughts += delta.text
        elif isinstance(delta, CallBegins):
            calls.append((delta.id, delta.name, ""))
        else:
            call_id, name, arguments = calls[-1]
            calls[-1] = call_id, name, arguments + delta.text
    made = tuple(ToolCall(*call) for call in calls)
    return AssistantMessage(content if content or not made else None, made, thoughts or None)
