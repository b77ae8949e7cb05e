"""All that is to be learned from one GPU, each stage in a process of its own.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --stages bits,llama
    python -m benchmarks.gpu --out DIR --pretend

DIR gets stages.jsonl, a line as soon as a stage has ended or its time is up, with the rows that it had found by then,
and report.md, written again behind each stage. Whatever a stage does, the others run; the exit code is 1 where one
failed. --pretend runs every stage on the CPU with little models: its figures mean nothing. Speed-ups of pipelines
cannot be measured on one GPU, whose workers take turns: `forecast` computes them from what has been measured.
"""

import argparse
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.report import report
from benchmarks.gpu.scene import Scene

STAGES = {
    "versions": ("parts", 60),
    "compiling": ("parts", 240),
    "bits": ("bits", 240),
    "eager": ("parts", 90),
    "sampler": ("parts", 90),
    "pipelines": ("pipelines", 360),
    "hops": ("pipelines", 120),
    "nccl": ("pipelines", 150),
    "llama": ("llama", 300),
    "forecast": ("llama", 60),
}
"""Each stage's module, and the seconds after which it is ended: several times of what it should take."""
Line = dict[str, Any]


def run_stage(name: str, out: Path, pretend: bool, deadline_s: float) -> Line:
    """What a stage has found; `error` says in a line why it has not come to its end."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", name, "--out", str(out), *["--pretend"] * pretend]
    began, error = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=said, stderr=complaints, start_new_session=True)
        try:
            if code := process.wait(deadline_s):
                error = f"exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"it took longer than {deadline_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its workers, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        complaints.seek(0)
        last = ([line.strip() for line in complaints if line.strip()] or [""])[-1]
        rows = list(_rows(said))
    error = error and f"{error}: {last[:300]}"
    return {"stage": name, "seconds": time.monotonic() - began, "error": error, "pretend": pretend, "rows": rows}


def _rows(said: Any) -> Iterator[Line]:
    """The lines that are JSON objects; a library may have said something, too, or the last one be cut short."""
    for line in said:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                yield row


def _run_here(name: str, scene: Scene) -> None:
    """A stage in this process: its rows on standard output as they are found."""
    if scene.pretend:
        torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.gpu.{STAGES[name][0]}")
    for row in getattr(module, name)(scene):
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--pretend", action="store_true", help="on the CPU, in small")
    parser.add_argument("--stages", default=",".join(STAGES), help="with commas; default: all")
    parser.add_argument("--run", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = options.stages.split(",")
    if unknown := set(asked) - set(STAGES):
        parser.error(f"--stages: {min(unknown)!r} is none of {', '.join(STAGES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.run:
        _run_here(options.run, Scene(options.pretend, options.out))
        return
    lines: list[Line] = []
    results = options.out / "stages.jsonl"
    results.write_text("")
    for name in asked:
        lines.append(run_stage(name, options.out, options.pretend, STAGES[name][1]))
        with results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        (options.out / "report.md").write_text(report(lines))
        print(f"{name}: {lines[-1]['error'] or 'done'}, {lines[-1]['seconds']:.0f} s", flush=True)
    sys.exit(any(line["error"] for line in lines))


if __name__ == "__main__":
    main()
