"""A reply with thinking or calls of tools as the deltas of a stream, in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from ppd_runtime.replies.message import Arguments, CallBegins, Content, Delta, Thought
from ppd_runtime.replies.reading import ReplyReading


class StreamedReply:
    """One choice's deltas: one for each piece of text, with all that became certain."""

    def __init__(self, reading: ReplyReading) -> None:
        self._reader = reading.open()
        self.calls = 0
        """Calls that were told."""

    def push(self, text: str) -> dict[str, Any]:
        """The delta of more text; empty if nothing became certain."""
        return self._delta(self._reader.push(text))

    def finish(self, rest: str) -> dict[str, Any]:
        """The last delta, with the text that is left."""
        return self._delta([*self._reader.push(rest), *self._reader.finish()])

    def _delta(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for one in deltas:
            if isinstance(one, Thought):
                told["reasoning_content"] = told.get("reasoning_content", "") + one.text
            elif isinstance(one, Content):
                told["content"] = told.get("content", "") + one.text
            elif isinstance(one, CallBegins):
                function = {"name": one.name, "arguments": ""}
                calls[self.calls] = {"index": self.calls, "id": one.id, "type": "function", "function": function}
                self.calls += 1
            else:
                self._add_arguments(calls, one)
        return {**told, "tool_calls": list(calls.values())} if calls else told

    def _add_arguments(self, calls: dict[int, dict[str, Any]], more: Arguments) -> None:
        index = self.calls - 1
        call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        call["function"]["arguments"] += more.text
