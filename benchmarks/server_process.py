"""`ppd serve` as a process of its own, for programs that measure or try it."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

START_S = 300.0
"""Within which a server listens; a first compilation takes minutes."""
_END_S = 120.0
PPD_SERVE = ("ppd_runtime.cli.entry", "serve")


@dataclass
class ServerProcess:
    """A server that listens."""

    url: str
    process: "subprocess.Popen[bytes]"
    log_file: Path

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_file.read_text(errors="replace")

    def end(self) -> int:
        """Tell it to end as a shell does, and wait; its exit code."""
        self.process.terminate()
        return self.process.wait(_END_S)


@contextlib.contextmanager
def server_process(
    options: Sequence[str], module: Sequence[str] = PPD_SERVE, one_core: bool = False
) -> Iterator[ServerProcess]:
    """A server at a free port, until the block ends.

    Args:
        options: of the command line.
        module: what `python -m` runs, with what comes before the options.
        one_core: give it one of this process' cores alone.

    Raises:
        ValueError: where it does not start, with its last words.
    """
    command = [sys.executable, "-m", *module, "--port", "0", *options]
    with tempfile.TemporaryDirectory(prefix="ppd-serve-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as written:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=written)
            if one_core:
                os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        try:
            yield ServerProcess(_address(process, log), process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(_END_S)


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while " at http" not in (said := log.read_text(errors="replace")) or not said.endswith("\n"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ValueError(f"the server did not start: {said.strip()[-500:] or process.poll()}")
        time.sleep(0.05)
    return next(line for line in said.splitlines() if " at http" in line).rpartition(" at ")[2].strip()
