"""`ppd chat` at a terminal: Ctrl-C ends an answer, Ctrl-C twice or Ctrl-D the program, and nothing is left of it."""

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from grids import nightly

_DEADLINE_S = 120
_WHERE = b"\x1b[6n"
"""Asks a terminal for the cursor's place, as the prompt does each time that it is ready for a message."""
_TYPED = b"\x1b[?2004l"
"""Ends the prompt once a message is typed: text that is pasted is told no longer."""


class Terminal:
    """Runs `ppd` in a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.written = b""
        self.family = set[psutil.Process]()
        pid, self._descriptor = pty.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
            command = [sys.executable, "-m", "ppd_runtime.cli.entry", *map(str, words)]
            os.execve(sys.executable, command, os.environ | {"TERM": "xterm"})
        self.process = psutil.Process(pid)

    def wait_for(self, words: bytes) -> None:
        """Read on until behind `words`."""
        deadline = time.monotonic() + _DEADLINE_S
        while words not in self.written:
            assert time.monotonic() < deadline, self.written
            assert self._read(), self.written
        self.family |= set(self.process.children(recursive=True))
        self.written = self.written.partition(words)[2]

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def ask(self, message: bytes) -> None:
        """Type a message once the prompt is there, and wait for the answer's beginning."""
        self.wait_for(_WHERE)
        self.type(message + b"\r")
        self.wait_for(_TYPED)
        while not self.written.strip():
            assert self._read(), "it has ended"

    def exit_code(self) -> int:
        """Its exit code, once it has ended."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.process.pid, 0)[1])

    def close(self) -> None:
        for process in (self.process, *self.family):
            if process.is_running():
                process.kill()
        os.close(self._descriptor)

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], 1.0)[0]:
            return True
        try:
            found = os.read(self._descriptor, 65536)
        except OSError:  # a terminal's end on Linux
            return False
        if _WHERE in found:
            self.type(b"\x1b[1;1R")
        self.written += found
        return bool(found)


WAYS = {"": 0, "--stages 2": 4, "--k 1": 4, "--method autoregressive": 0}
"""Options, and the processes that they start: two workers, who forks them, and who clears up."""
BY_DAY = [("", "Ctrl-D"), ("--stages 2", "Ctrl-C twice")]
ENDS = {"Ctrl-D": b"\x04", "Ctrl-C twice": b"\x03\x03"}
PAIRS = [pytest.param(way, end, marks=() if (way, end) in BY_DAY else nightly) for way in WAYS for end in ENDS]


@pytest.mark.parametrize(("way", "end"), PAIRS)
def test_ctrl_c_ends_an_answer_and_then_the_program(
    model_folder: Callable[..., Path], tmp_path: Path, way: str, end: str
) -> None:
    """Answers do not end by themselves meanwhile."""
    folder, template = model_folder("llama", max_position_embeddings=100_000), tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    settings = ("--chat-template", template, "--ignore-eos", "--dtype", "float32", "--no-compile", "--temperature", "0")
    with contextlib.closing(Terminal("chat", folder, *way.split(), *settings)) as terminal:
        for message in (b"fox", b"dog"):
            terminal.ask(message)
            terminal.type(b"\x03")
            terminal.wait_for(b", cancelled")
        terminal.wait_for(_WHERE)
        assert len(terminal.family) >= WAYS[way]
        terminal.type(ENDS[end])
        assert terminal.exit_code() == 0
        assert b"Traceback" not in terminal.written
        assert not psutil.wait_procs(terminal.family, timeout=_DEADLINE_S)[1]
