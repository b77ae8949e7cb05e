"""A stage of the benchmark in a process of its own, which may fail or take too long without harm to others."""

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.scene import Scene

Line = dict[str, Any]
_MODULES = ("parts", "bits", "pipelines", "llama")


def run_stage(name: str, module: str, out: Path, pretend: bool, deadline_s: float) -> Line:
    """What a stage of `benchmarks.gpu` has found; `error` says in a line why it has not come to its end.

    Its process starts afresh, as CUDA needs it. Where there is no CUDA it comes from one that has imported everything.
    """
    context: Any = multiprocessing.get_context("forkserver" if pretend else "spawn")
    if pretend:
        context.set_forkserver_preload([f"benchmarks.gpu.{module}" for module in _MODULES])
    began, error = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="ppd-gpu-") as folder:
        said, complaints = (Path(folder) / name for name in ("said", "complaints"))
        process = context.Process(target=_run_here, args=(name, module, Scene(pretend, out), said, complaints))
        process.start()
        try:
            process.join(deadline_s)
            if process.exitcode is None:
                error = f"it took longer than {deadline_s:.0f} s"
            elif process.exitcode:
                error = f"exit code {process.exitcode}"
        finally:
            _end(process)
        rows = list(_rows(_lines(said)))
        last = ([line.strip() for line in _lines(complaints) if line.strip()] or [""])[-1]
    error = error and f"{error}: {last[:300]}"
    return {"stage": name, "seconds": time.monotonic() - began, "error": error, "pretend": pretend, "rows": rows}


def _end(process: Any) -> None:
    """A stage's process, and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _rows(lines: list[str]) -> Iterator[Line]:
    """The lines that are JSON objects; a library may have said something, too, or the last one be cut short."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def _run_here(name: str, module: str, scene: Scene, said: Path, complaints: Path) -> None:
    """A stage in this process: its rows on standard output as they are found."""
    os.setsid()
    for path, stream in ((said, sys.stdout), (complaints, sys.stderr)):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    if scene.pretend:
        torch.set_num_threads(1)
    for row in getattr(importlib.import_module(module), name)(scene):
        print(json.dumps(row), flush=True)
