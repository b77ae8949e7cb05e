"""gpt-oss' format: messages on channels, each with a header that says what it is."""

import re
from collections.abc import Sequence
from typing import ClassVar

from ppd_runtime.replies.reader import Reader, Reading, Tell

_MESSAGE, _END, _CALL, _RETURN, _START = "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>"
_CHANNEL, _CONSTRAIN = "<|channel|>", "<|constrain|>"
_ENDS = (_END, _CALL, _RETURN, _START)
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")


class Harmony(Reader):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`, and the like.

    The channel analysis is thinking, a message to a function is a call, and all others are text.
    """

    markers: ClassVar[Sequence[str]] = (_MESSAGE, *_ENDS, _CHANNEL, _CONSTRAIN)
    end_of_call: ClassVar[str | None] = _CALL

    def _read(self) -> Reading:
        yield
        header = [(yield from self._white_space())]
        header += yield from self._beginning()
        if len(header) == 1:
            self._content(header[0])
            yield from self._until(_ENDS, self._content)  # it goes on with a message, or knows no channels
        while not self._over or self._text:
            found = yield from self._until((_MESSAGE, _END, _RETURN), header.append)
            if found == _MESSAGE:
                yield from self._body("".join(header))
            elif found is None:
                return
            header = []

    def _beginning(self) -> Reading:
        """The header's beginning, if the reply begins with one, in a list."""
        for begins in (_CHANNEL, "to="):
            if (yield from self._begins_with(begins)):
                return [begins]
        return []

    def _body(self, header: str) -> Reading:
        channel, recipient = _NAME.search(header), _RECIPIENT.search(header)
        tell: Tell = self._content
        if recipient:
            self._call(recipient[1])
            tell = self._arguments
        elif channel and channel[1] == "analysis" and self._thinking is not None:
            tell = self._thought
        elif self._has_content:
            self._space = "\n"
        yield from self._until(_ENDS, tell)
        self._space = ""
