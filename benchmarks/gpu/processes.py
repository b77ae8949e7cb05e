"""A stage of the benchmark in a process of its own, which may fail or take too long without harm to others.

`python -m benchmarks.gpu.processes NAME MODULE` runs a stage and prints its rows as they are found.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.scene import Scene

Line = dict[str, Any]


def run_stage(name: str, module: str, pretend: bool, deadline_s: float) -> Line:
    """What a stage of `benchmarks.gpu` has found; `error` says in a line why it has not come to its end."""
    command = [sys.executable, "-m", "benchmarks.gpu.processes", name, module, *["--pretend"] * pretend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began, error = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=said, stderr=complaints, env=environment, start_new_session=True)
        try:
            if process.wait(deadline_s):
                error = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"it took longer than {deadline_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its workers
            process.wait()
        for file in (said, complaints):
            file.seek(0)
        rows = list(_rows(said))
        last = ([line.strip() for line in complaints if line.strip()] or [""])[-1]
    error = error and f"{error}: {last[:300]}"
    return {"stage": name, "seconds": time.monotonic() - began, "error": error, "pretend": pretend, "rows": rows}


def _rows(lines: Any) -> Iterator[Line]:
    """The lines that are JSON objects; a library may have said something, too, or the last one be cut short."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def main() -> None:
    """Run a stage here."""
    name, module, *pretend = sys.argv[1:]
    if pretend:
        torch.set_num_threads(1)
    for row in getattr(importlib.import_module(module), name)(Scene(bool(pretend))):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
