"""Every benchmark, one after the other, and a report of them: `make bench`, or `python -m benchmarks`.

The report is MACHINE.md, one file for each kind of machine, with the date, the commit, the versions, the commands and
their tables. When all commands have run it takes the place of that machine's earlier report, which stays in the
repository's history. Where one fails, the others go on, the report is MACHINE-failed.md, and the exit code is 1.
"""

import argparse
import datetime
import importlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recording import Figures, environment, slug
from ppd_runtime.files.atomic import atomic_file

_RESULTS = Path(__file__).parent / "results"
_CONDITIONS = "Warm-up dropped; compared runs are paired and in turn; medians, with quartiles where they are given."
_DEADLINE_S = 900
_PAPER = "'k=1;speculation=always'"
_DEVICES = "--emulate-layer-ms 3 --limit 3"
_OFF = "repetitions=no"
PLAN = (
    ("Ordinary decoding and its memory floor", "decode --rounds 3"),
    ("", "decode --model random:512x12 --rounds 3 --limit 1 --tokens 32 --no-quality"),
    ("Layouts with default settings", "layouts --model smollm2 --tokens 32"),
    ("", "layouts --model smollm2 --tokens 32 --limit 4 --never-right"),
    ("", "layouts --layouts stages=2,k=1,k=3,threads=2"),
    ("The paper's layout beside Theorem 4.1", f"layouts --layouts {_PAPER} --eager --limit 3 --rounds 3"),
    ("", f"layouts --layouts {_PAPER} --limit 3 --rounds 3"),
    ("", f"layouts --model random:512x12 --match-rate 0.7 --layouts {_PAPER} --limit 3 --rounds 2"),
    ("Emulated devices", f"layouts {_DEVICES} --layouts 'k=3,k=3;workers=1,threads=4,stages=4;rows=8'"),
    ("", f"layouts {_DEVICES} --layouts 'stages=4;rows=8;{_OFF},stages=6;rows=8;{_OFF}'"),
    ("", f"layouts {_DEVICES} --layouts 'stages=4;rows=8;{_OFF}' --temperature 1"),
    ("", f"layouts {_DEVICES} --layouts 'stages=4;rows=8;{_OFF}' --hop-ms 5"),
    ("", "draft_models"),
    ("Hops between two processes", "hop --count 100"),
    ("The server", "serving --at-once 1,2,4,8,16"),
    ("", "serving --at-once 8 --requests 200 --bad-share 0.2 --leave-share 0.2 --kill-every-s 5"),
    ("", "forms --rounds 3"),
    ("Start-up and the first token", "startup --rounds 2"),
    ("Lost workers", "faults --faults 10"),
    ("Beside other engines", "peers --rounds 2 --limit 1 --tokens 32"),
)
"""(heading, command) each; a command without a heading belongs to the one above."""


def report(plan: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Run the commands of a plan; the report in Markdown, and how many of them failed."""
    where, began, failures = environment(), time.monotonic(), 0
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    made = f"{datetime.date.today()}, commit {where['commit'] or 'unknown'}, by `make bench`. {versions}."
    parts = [f"# {where['machine']}", made, _CONDITIONS]
    for heading, command in plan:
        its_begin = time.monotonic()
        sys.stderr.write(f"{its_begin - began:4.0f} s  {command}\n")
        outcome, failed = _outcome(command)
        failures += failed
        parts += [f"## {heading}"] * bool(heading)
        parts += [f"```\npython -m benchmarks.{command}  # {time.monotonic() - its_begin:.0f} s\n```", outcome]
    took = (time.monotonic() - began) / 60
    parts.append(f"All of it took {took:.1f} minutes; {failures} of {len(plan)} failed.")
    return "\n\n".join(parts) + "\n", failures


def _outcome(command: str) -> tuple[str, bool]:
    """Run one benchmark in a Python of its own; its table, or how it failed, and whether it did."""
    name, *options = shlex.split(command)
    with tempfile.TemporaryDirectory(prefix="ppd-bench-") as folder:
        path = Path(folder, "figures.json")
        arguments = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path)]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return f"FAILED: it had not ended after {_DEADLINE_S} s.", True
        if not path.exists():
            last_words = (done.stderr.strip().splitlines() or ["no last words"])[-1]
            return f"FAILED with exit code {done.returncode}: {last_words}", True
        figures: Figures = json.loads(path.read_text())
    return importlib.import_module(f"benchmarks.{name}").table(figures), bool(done.returncode)


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=_RESULTS, help="where the report goes")
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        parser.exit(2, f"{parser.prog}: --folder {folder}: there is no such folder\n")
    text, failures = report(PLAN)
    path = folder / f"{slug(environment())}{'-failed' * bool(failures)}.md"
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    print(path)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
