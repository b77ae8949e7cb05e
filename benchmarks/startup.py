"""Time from the command to the first token, with a breakdown, each in a Python of its own.

    python -m benchmarks.startup --rounds 3 --json figures.json

Cold: the files of Python's packages and of the model have been dropped from the system's page cache, as far as no
other program holds them, and the user's cache folder (compiled code, the dtype found fastest) is empty. Warm: all of
it is there. A layout's phases are Python itself, imports, settings, workers (which import, and load their layers) and
the first token of a short prompt; description, tokenizer and weights are the parts of settings and workers that this
process spends on reading the model's configuration, its tokenizer and its layers. Of a command, `ppd generate` is timed
to its first output, the others to their end.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread

_PROMPT = "def read_lines(path):"
_PHASES = ("python", "torch", "other imports", "settings", "workers", "first token")
_PARTS = {"description": "describe", "tokenizer": "load_tokenizer", "weights": "load_stage"}
"""What is read of a model, and the function that reads it."""
_READERS = ("ppd_runtime.methods.ordinary", "ppd_runtime.runtime", "ppd_runtime.workers.worker")
_LAYOUTS = ("ordinary", "compiled", "threads-1", "processes-1", "processes-3", "ray-1", "ray-3")
_COMMANDS = {
    "ppd --help": ["--help"],
    "ppd tradeoff": ["tradeoff", "--layers=40", "--exit-layer=20", "--k=1,3,5", "--match-rate=0.68", "--tokens=128"],
    "ppd generate": ["generate", _PROMPT, "--transport=local", "--k=1", "--max-new-tokens=8"],
}
_TO_FIRST_OUTPUT = {"ppd generate"}
_DEADLINE_S = 300


def measure(options: argparse.Namespace) -> Figures:
    """A row for each layout and command, cold and warm."""
    unknown = set(options.layouts) - {*_LAYOUTS, *_COMMANDS}
    if unknown:
        raise ValueError(f"--layouts {unknown.pop()}: choose from {', '.join((*_LAYOUTS, *_COMMANDS))}")
    return {"rows": [row for name in options.layouts for row in _rows(name, options.rounds)], "rounds": options.rounds}


def _rows(name: str, rounds: int) -> Iterator[Figures]:
    """One cold start and `rounds` warm ones."""
    with tempfile.TemporaryDirectory(prefix="ppd-cache-") as cache:
        drop_from_page_cache()
        for state, count in (("cold", 1), ("warm", rounds)):
            seconds: defaultdict[str, list[float]] = defaultdict(list)
            for _ in range(count):
                for phase, spent in _phases(name, cache).items():
                    seconds[phase].append(spent)
            yield {"layout": name, "state": state, "seconds": dict(seconds)}


def table(figures: Figures) -> str:
    """Medians in Markdown, in seconds; quartiles for the whole."""
    rows = []
    for row in figures["rows"]:
        medians = {phase: f"{statistics.median(values):.2f}" for phase, values in row["seconds"].items()}
        whole = spread(row["seconds"]["whole"])
        rows.append([row["layout"], row["state"], whole, *(medians.get(phase) for phase in (*_PHASES, *_PARTS))])
    columns = ["layout-k or command", "state", "whole, s", *_PHASES, *(f"of it {part}" for part in _PARTS)]
    return markdown(columns, rows)


def drop_from_page_cache() -> None:
    """Ask the system to forget the contents of Python's packages and of this project's files."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1])}:
        for path in _files(Path(folder)):
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def first_token(layout: str) -> None:
    """In a Python of its own: go through the phases; print when each ended, and how long reading the model took."""
    ended = {"python": time.perf_counter()}
    import torch  # noqa: F401

    ended["torch"] = time.perf_counter()
    from ppd_runtime import OrdinaryDecoding, PPDRuntime

    ended["other imports"] = time.perf_counter()
    parts = _time_the_parts()
    launcher, _, k = layout.partition("-")
    if launcher in ("ordinary", "compiled"):
        generator = OrdinaryDecoding(compile=launcher == "compiled")
        ended["settings"] = time.perf_counter()
    else:
        layout_settings = {"transport": "local"} if launcher == "threads" else {"launcher": launcher}
        generator = PPDRuntime(k=int(k), **layout_settings)
        ended["settings"] = time.perf_counter()
        generator.start()
        ended["workers"] = time.perf_counter()
    with generator, contextlib.closing(generator.stream(_PROMPT, max_new_tokens=8)) as stream:
        next(stream)
        ended["first token"] = time.perf_counter()
        print(json.dumps({"ended": ended, "parts": parts}), flush=True)


def _time_the_parts() -> dict[str, float]:
    """Let the functions that read a model add their seconds to what is returned."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for module in map(importlib.import_module, _READERS):
        for part, name in _PARTS.items():
            if function := getattr(module, name, None):
                setattr(module, name, _timed(function, part, seconds))
    return seconds


def _timed(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **settings: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **settings)
        finally:
            seconds[part] += time.perf_counter() - began

    return timed


def _phases(name: str, cache: str) -> dict[str, float]:
    """Seconds of each phase of one start, of the whole, and of the parts that are known."""
    if name in _COMMANDS:
        return {"whole": _command_seconds(name, cache)}
    began = time.perf_counter()
    output = _run(f"from benchmarks.startup import first_token; first_token({name!r})", cache)
    told = json.loads(output.splitlines()[-1])
    ended: dict[str, float] = told["ended"]
    before = [began, *ended.values()]
    phases = {phase: moment - earlier for (phase, moment), earlier in zip(ended.items(), before, strict=False)}
    return {"whole": ended["first token"] - began} | phases | told["parts"]


def _command_seconds(name: str, cache: str) -> float:
    script = f"from ppd_runtime.cli.main import app; app({_COMMANDS[name]!r})"
    began = time.perf_counter()
    if name not in _TO_FIRST_OUTPUT:
        _run(script, cache)
        return time.perf_counter() - began
    with subprocess.Popen(**_python(script, cache)) as process:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        _, errors = process.communicate(timeout=_DEADLINE_S)
    if not first:
        raise RuntimeError(f"{name} failed: {_last_line(errors)}")
    return seconds


def _run(script: str, cache: str) -> str:
    outcome = subprocess.run(**_python(script, cache), timeout=_DEADLINE_S, check=False)
    if outcome.returncode:
        raise RuntimeError(f"{script} failed: {_last_line(outcome.stderr)}")
    return outcome.stdout


def _python(script: str, cache: str) -> dict[str, Any]:
    """A Python that runs `script`, with a cache folder of its own."""
    return {
        "args": [sys.executable, "-c", script],
        "cwd": Path(__file__).parents[1],
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"XDG_CACHE_HOME": cache},
    }


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["no last words"])[-1]


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
