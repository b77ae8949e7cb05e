"""Time from the command to the first token, with a breakdown, each in a Python of its own.

    python -m benchmarks.startup --rounds 3 --json figures.json

Cold: the files of Python's packages and of the model have been dropped from the system's page cache, as far as no
other program holds them; warm: they are there. A layout's phases: Python itself, imports, settings (which read the
model's configuration and tokenizer), workers (which load their layers), and the first token of a short prompt.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread

_PROMPT = "def read_lines(path):"
_PHASES = ("python", "imports", "settings", "workers", "first token")
_LAYOUTS = ("ordinary", "threads-1", "processes-1", "ray-1", "ray-3")
_COMMANDS = {
    "ppd --help": ["--help"],
    "ppd tradeoff": ["tradeoff", "--layers=40", "--exit-layer=20", "--k=1,3,5", "--match-rate=0.68", "--tokens=128"],
}
_DEADLINE_S = 300


def measure(options: argparse.Namespace) -> Figures:
    """A row for each layout and command, cold and warm."""
    unknown = set(options.layouts) - {*_LAYOUTS, *_COMMANDS}
    if unknown:
        raise ValueError(f"--layouts {unknown.pop()}: choose from {', '.join((*_LAYOUTS, *_COMMANDS))}")
    rows = []
    for name in options.layouts:
        drop_from_page_cache()
        cold = _phases(name)
        warm: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for phase, seconds in _phases(name).items():
                warm[phase].append(seconds)
        rows += [{"layout": name, "state": "cold", "seconds": {phase: [value] for phase, value in cold.items()}}]
        rows += [{"layout": name, "state": "warm", "seconds": dict(warm)}]
    return {"rows": rows, "rounds": options.rounds}


def table(figures: Figures) -> str:
    """Medians in Markdown, in seconds; quartiles for the whole."""
    rows = []
    for row in figures["rows"]:
        medians = {phase: f"{statistics.median(values):.2f}" for phase, values in row["seconds"].items()}
        whole = spread(row["seconds"]["whole"])
        rows.append([row["layout"], row["state"], whole, *(medians.get(phase) for phase in _PHASES)])
    return markdown(["layout-k or command", "state", "whole, s", *_PHASES], rows)


def drop_from_page_cache() -> None:
    """Ask the system to forget the contents of Python's packages and of this project's files."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1])}:
        for path in _files(Path(folder)):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def first_token(layout: str) -> None:
    """In a Python of its own: go through the phases and print the moment that each ended at."""
    moments = {"python": time.perf_counter()}
    from ppd_runtime import OrdinaryDecoding, PPDRuntime

    moments["imports"] = time.perf_counter()
    launcher, _, k = layout.partition("-")
    if launcher == "ordinary":
        generator = OrdinaryDecoding()
        moments["settings"] = time.perf_counter()
    else:
        layout_settings = {"transport": "local"} if launcher == "threads" else {"launcher": launcher}
        generator = PPDRuntime(k=int(k), **layout_settings)
        moments["settings"] = time.perf_counter()
        generator.start()
        moments["workers"] = time.perf_counter()
    with generator, contextlib.closing(generator.stream(_PROMPT, max_new_tokens=8)) as stream:
        next(stream)
        moments["first token"] = time.perf_counter()
        print(json.dumps(moments), flush=True)


def _phases(name: str) -> dict[str, float]:
    """Seconds of each phase of one start, and of the whole."""
    if name in _COMMANDS:
        script = f"from ppd_runtime.cli.main import app; app({_COMMANDS[name]!r})"
    else:
        script = f"from benchmarks.startup import first_token; first_token({name!r})"
    began = time.perf_counter()
    outcome = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    ended = time.perf_counter()
    if outcome.returncode:
        raise RuntimeError(f"{name} failed: {(outcome.stderr.strip().splitlines() or ['no last words'])[-1]}")
    if name in _COMMANDS:
        return {"whole": ended - began}
    moments: dict[str, float] = json.loads(outcome.stdout.splitlines()[-1])
    before = [began, *moments.values()]
    phases = {phase: moment - earlier for (phase, moment), earlier in zip(moments.items(), before, strict=False)}
    return {"whole": moments["first token"] - began} | phases


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for path in (Path(root, name) for name in names) if path.is_file())


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--rounds", type=positive, default=3, help="warm starts of each")
    names = ", ".join((*_LAYOUTS, *_COMMANDS))
    options.add_argument("--layouts", type=_names, default=[*_COMMANDS, *_LAYOUTS], help=f"with commas: {names}")
    return options


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


if __name__ == "__main__":
    run(parser(), measure, table)
