"""Programs that use the runtime and are ended in the middle of it: nothing of theirs may stay behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

WORDS = {"exception": "an exception of the user's", "interrupt": "KeyboardInterrupt", "kill": "", "terminate": ""}
"""What a program says last, by the way it ends."""
_SIGNALS = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "terminate": signal.SIGTERM}
_SHARED_MEMORY = Path("/dev/shm")
_SOURCE = """
import sys, time
from ppd_runtime.imports import quick_imports
with quick_imports():
    from ppd_runtime import PPDRuntime
if __name__ == "__main__":
    with PPDRuntime({folder!r}, k=2, launcher={launcher!r}, **{layout!r}) as runtime:
        stream = runtime.stream([5, 9, 200, 31], max_new_tokens=400)
        next(stream)
        print("running", "ray" in sys.modules, flush=True)
        if {hang}:
            time.sleep(60)
        raise KeyError("an exception of the user's")
"""


class Program:
    """Starts a runtime of three workers, says so in the middle of a request, and hangs or raises there.

    Args:
        folder: the model's.
        launcher: the runtime's.
        ending: one of `WORDS`.
        layout: the runtime's; by default a main process and two sub-processes.
    """

    def __init__(self, folder: str, launcher: str, ending: str, **layout: int) -> None:
        self._ending, self.family = ending, set[psutil.Process]()
        self._shared_before = _shared()
        self._folder = tempfile.TemporaryDirectory(dir="/tmp", prefix="t")  # leaves room for sockets' names
        script = Path(self._folder.name, "program.py")
        script.write_text(_SOURCE.format(folder=folder, launcher=launcher, layout=layout, hang=ending != "exception"))
        self._temporary = Path(self._folder.name, "t")
        self._temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(self._temporary)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for process in self.family:
            if process.is_running():
                process.kill()
        self._folder.cleanup()

    def line(self) -> str:
        """What it says next, its processes having been counted."""
        line = self.process.stdout.readline().strip()
        self._count()
        return line

    def run_for(self, seconds: float) -> None:
        """Let it run for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._count()
            time.sleep(0.02)

    def end(self) -> None:
        """End it in its way, and check that nothing stays."""
        self.interrupt()
        words = self._last_words()
        assert WORDS[self._ending] in words
        if self._ending == "terminate":
            assert self.process.returncode == -signal.SIGTERM, "143 to a shell"
            assert "SIGTERM" not in words, "Ray's core says where in C++ it was"
        self.check_that_nothing_is_left()

    def interrupt(self) -> None:
        """Send it the signal that ends it, if it does not end by itself."""
        self._count()
        if self._ending in _SIGNALS:
            self.process.send_signal(_SIGNALS[self._ending])

    def check_that_nothing_is_left(self) -> None:
        """No process after 15 s, no temporary file and no shared memory 5 s later."""
        self._last_words()
        _, alive = psutil.wait_procs(self.family, timeout=15)
        assert not alive
        deadline = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left

    def _last_words(self) -> str:
        """Wait for its end: what it wrote to stderr.

        Python raises KeyboardInterrupt wherever it is, and where that is some library's `__del__` it only says so and
        goes on: then it is interrupted once more, as a user would.
        """
        try:
            return self.process.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired as error:
            words = (error.stderr or b"").decode(errors="replace")
            if "Exception ignored in" in words and "KeyboardInterrupt" in words:
                self.process.send_signal(signal.SIGINT)
            return self.process.communicate(timeout=40)[1]

    def _left(self) -> list[Path]:
        return [*self._temporary.iterdir(), *(_shared() - self._shared_before)]

    def _count(self) -> None:
        if psutil.pid_exists(self.process.pid):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))


def _shared() -> set[Path]:
    """What is in shared memory, but for semaphores of `multiprocessing`: no worker has any, other tests may."""
    return {path for path in _SHARED_MEMORY.iterdir() if not path.name.startswith("sem.mp-")}
