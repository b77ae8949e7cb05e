"""What is typed for `ppd chat`: messages of one line or several, at a terminal or from a pipe."""

import io
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from ppd_runtime.cli.conversation import COMMANDS, SETTABLE, is_open

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.key_binding import KeyBindings


def is_terminal() -> bool:
    """Whether somebody types, and sees what comes."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def typed_lines(stream: TextIO) -> Iterator[str]:
    """The messages of a pipe or file, one a line, or several where they belong together.

    Raises:
        ValueError: for what is no UTF-8 text, or where a message is not finished at the end.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield from _joined(stream)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: no UTF-8 text at byte {error.start}; give a text") from error


def _joined(lines: Iterable[str]) -> Iterator[str]:
    typed: list[str] = []
    for line in lines:
        typed.append(line.rstrip("\r\n"))
        if not is_open("\n".join(typed)):
            yield "\n".join(typed)
            typed = []
    if typed:
        raise ValueError(f'the last message is not finished: {typed[0]!r:.80}; end it with """, or without a backslash')


def typed_at_terminal() -> Iterator[str]:
    """The messages that somebody types until they leave: with Ctrl-D, or with Ctrl-C twice."""
    session, interrupts = _session(), 0
    while interrupts < 2:
        try:
            typed = session.prompt("> ")
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts == 1:
                sys.stderr.write("Ctrl-C again leaves\n")
            continue
        except EOFError:
            return
        interrupts = 0
        yield typed


def _session() -> "PromptSession[str]":
    from prompt_toolkit import PromptSession

    return PromptSession(
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
        completer=_completer(),
        complete_while_typing=False,
    )


def _keys() -> "KeyBindings":
    """Enter ends a message that is not open; Alt-Enter begins another line of it."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _completer() -> "Completer":
    """Commands behind a slash, and settings behind /set, by the Tab key."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Words(Completer):
        """Completes the word at the cursor."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            *before, word = document.text_before_cursor.split(" ")
            known = SETTABLE if before == ["/set"] else () if before else [f"/{name}" for name in COMMANDS]
            yield from (Completion(each, -len(word)) for each in known if each.startswith(word))

    return Words()
