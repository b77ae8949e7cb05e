"""Gemma's format, which its prompts choose: Python or JSON in a Markdown fence, or alone."""

from ppd_runtime.replies.python_calls import python_calls
from ppd_runtime.replies.reader import Reader, Reading

_FENCE = "```"
_FENCES = ("```tool_code", "```tool_call", "```json", "```python")


class Gemma(Reader):
    """Calls in a fence: Python's `f(city="Paris")`, or JSON objects with name and arguments.

    An answer that begins with a bracket may be calls without a fence. Code and objects that call no tool of the request
    are text.
    """

    def _answer(self) -> Reading:
        self._begin_attempt()
        yield from self._white_space()
        if self._text.startswith(("{", "[")):
            yield from self._block("")
        self._give_up()
        while fence := (yield from self._until(_FENCES, self._content)):
            self._begin_attempt(fence)
            yield from self._white_space()
            yield from self._block(_FENCE)
            self._give_up()

    def _block(self, end: str) -> Reading:
        """Read calls up to `end`, or up to the text's end; what is left to `_give_up` is none."""
        opened = yield from self._begins_with("[")
        yield from self._white_space()
        if self._text.startswith("{"):
            yield from self._objects()
        else:
            yield from self._python("[" if opened else "", (end,) if end else ())
            return
        if end and (yield from self._begins_with(end)):
            self._begin_attempt()

    def _objects(self) -> Reading:
        while self._text.startswith("{") and (yield from self._call_object(only_known=True)):
            self._begin_attempt()
            yield from self._white_space()
            if (yield from self._begins_with(",")) or (yield from self._begins_with("]")):
                yield from self._white_space()

    def _python(self, begun: str, ends: tuple[str, ...]) -> Reading:
        code = [begun]
        yield from self._until(ends, code.append)
        try:
            calls = python_calls("".join(code))
        except ValueError:
            return
        if not all(name in self._tools for name, _ in calls):
            return
        for name, arguments in calls:
            self._call(name)
            self._arguments(arguments)
