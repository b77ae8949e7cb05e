"""Every benchmark, one after the other, and a report of them: `make bench`, or `python -m benchmarks`.

The report is MACHINE.md, one file for each kind of machine, with the date, the commit, the versions, the commands and
their tables. It takes the place of that machine's earlier report, which stays in the repository's history, when all
commands have run. Where one fails, the others go on, the report is MACHINE-failed.md, and the exit code is 1.
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

from benchmarks.recording import Figures, environment, slug, write_whole

_RESULTS = Path(__file__).parent / "results"
_EMULATED = "Emulated devices: stages compute their real results and then sleep until a layer's time has passed"
_CONDITIONS = "Warm-up dropped; compared runs are paired and in turn; medians, with quartiles where they are given."
_DEADLINE_S = 900
_WIDE = "--model random:512x12 --dtype float32"
_STARTS = "'ordinary,compiled,threads-1,ray-3,ppd --help,ppd tradeoff,ppd generate'"
_SHORT = "--rounds 1 --limit 3 --no-repetitions"
_EMULATED_ALIKE = "The same number of emulated devices, used in several ways"
_DEVICES = "--emulate-layer-ms 3 --compile --rows 8 --tokens 64 --rounds 1"
PLAN = (
    ("Ordinary decoding and its floor", "decode --dtype float32 --rounds 5"),
    ("", f"decode {_WIDE} --rounds 3"),
    ("Passes over several tokens", "passes"),
    ("", "passes --model random:512x12 --rounds 21"),
    ("What weights of few bits cost in quality", "weight_formats"),
    ("What recording costs", "tracing --rounds 15"),
    ("Hops between two processes", "hop --count 100"),
    ("Start-up", f"startup --rounds 1 --layouts {_STARTS}"),
    ("The demo model", "pipeline --rounds 3"),
    ("", "pipeline --compile --rounds 3"),
    ("", "pipeline --match-rate 0 --compile --rounds 2"),
    ("", "pipeline --match-rate 1 --compile --rounds 2"),
    ("A wider model with a set match rate", f"contention {_WIDE} --match-rate 0.7 --seconds 0.2 --rounds 5"),
    ("", f"pipeline {_WIDE} --match-rate 0.7 --tokens 64 --rounds 2"),
    ("", f"pipeline {_WIDE} --match-rate 0.7 --tokens 64 --rounds 2 --compile"),
    (_EMULATED, "pipeline --k 3 --compile --emulate-layer-ms 3 --tokens 64 --rounds 2"),
    ("", "pipeline --k 3 --workers 1 --compile --emulate-layer-ms 3 --tokens 64 --rounds 2"),
    ("", "pipeline --k 7 --compile --emulate-layer-ms 3 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --compile --emulate-layer-ms 1 --tokens 64 --rounds 2"),
    ("", "pipeline --k 3 --workers 1 --compile --emulate-layer-ms 1 --tokens 64 --rounds 2"),
    ("Stages", "stages --stages 2 --rounds 2"),
    ("", "stages --stages 2 --compile --rounds 2 --beside --contention"),
    (_EMULATED, "stages --stages 4 --rows 8 --compile --emulate-layer-ms 3 --rounds 1"),
    ("", "stages --stages 4 --rows 8 --compile --emulate-layer-ms 3 --rounds 1 --temperature 1"),
    ("", "stages --stages 6 --rows 8 --compile --emulate-layer-ms 3 --rounds 1"),
    ("", "stages --stages 4 --rows 8 --row-cost 0.05 --compile --emulate-layer-ms 3 --rounds 1"),
    ("", "stages --stages 4 --rows 8 --compile --emulate-layer-ms 3 --rounds 1 --prompts repeating"),
    ("", f"stages --stages 4 --rows 8 --compile --emulate-layer-ms 3 {_SHORT} --hop-ms 5"),
    ("", f"stages --stages 4 --rows 8 --compile --emulate-layer-ms 3 {_SHORT} --match-rate 0"),
    ("Fewer sub-processes than candidates", "pipeline --k 3 --workers 1 --dtype float32 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --workers 2 --dtype float32 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --workers 3 --dtype float32 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --workers 1 --dtype bfloat16 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --workers 2 --dtype bfloat16 --tokens 64 --rounds 1"),
    ("", "pipeline --k 3 --workers 3 --dtype bfloat16 --tokens 64 --rounds 1"),
    ("The same devices, used in several ways", "equal_devices --rounds 2"),
    (_EMULATED_ALIKE, f"equal_devices --devices 3 {_DEVICES}"),
    ("", f"equal_devices --devices 4 {_DEVICES}"),
    ("", f"equal_devices --devices 6 {_DEVICES}"),
    ("The server", "serve --stages 2 --compile --beside --own-cost --requests 16 --tokens 32 --at-once 1,2,4,8,16"),
)
"""(heading, command) each; about 20 minutes on two cores."""


def report(plan: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """Run the commands of a plan; the report in Markdown, and how many of them failed."""
    where, began, failures = environment(), time.monotonic(), 0
    today, commit = datetime.date.today(), where["commit"] or "unknown"
    lines = [f"# {where['machine']}", "", f"{today}, commit {commit}, by `make bench`. {_versions(where)}.", ""]
    lines += [_CONDITIONS, ""]
    for heading, commands in _sections(plan):
        asked, outcomes = [], []
        for number, command in enumerate(commands, start=1):
            its_begin = time.monotonic()
            sys.stderr.write(f"{its_begin - began:4.0f} s  {command}\n")
            outcome, failed = _outcome(command)
            failures += failed
            which = f"command {number}, " if len(commands) > 1 else ""
            asked.append(f"python -m benchmarks.{command}  # {which}{time.monotonic() - its_begin:.0f} s")
            outcomes.append(outcome)
        lines += [f"## {heading}", "", "```", *asked, "```", "", merged(outcomes), ""]
    lines += [f"All of it took {(time.monotonic() - began) / 60:.1f} minutes; {failures} of {len(plan)} failed.", ""]
    return "\n".join(lines), failures


def merged(outcomes: Sequence[str]) -> str:
    """What a section's commands gave: rows under the same heads are one table, with their command's number."""
    if len(outcomes) == 1:
        return outcomes[0]
    blocks: dict[str, list[str]] = {}
    for number, outcome in enumerate(outcomes, start=1):
        for head, *rest in (block.splitlines() for block in outcome.split("\n\n")):
            if rest:
                rows = blocks.setdefault(f"| command {head}\n| --- {rest[0]}", [])
                rows += [f"| {number} {row}" for row in rest[1:]]
            else:
                blocks[f"Command {number} {head}"] = []
    return "\n\n".join("\n".join([head, *rows]) for head, rows in blocks.items())


def _sections(plan: Sequence[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """The commands under each heading; one without a heading belongs to the last."""
    sections: list[tuple[str, list[str]]] = []
    for heading, command in plan:
        if heading:
            sections.append((heading, []))
        sections[-1][1].append(command)
    return sections


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
        if done.returncode:
            last_words = (done.stderr.strip().splitlines() or ["no last words"])[-1]
            return f"FAILED with exit code {done.returncode}: {last_words}", True
        figures: Figures = json.loads(path.read_text())
    return importlib.import_module(f"benchmarks.{name}").table(figures), False


def _versions(where: Figures) -> str:
    return ", ".join(f"{name} {number}" for name, number in where["versions"].items())


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=_RESULTS, help="where the report goes")
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        parser.exit(2, f"{parser.prog}: --folder {folder}: there is no such folder\n")
    text, failures = report(PLAN)
    path = folder / f"{slug(environment())}{'-failed' * bool(failures)}.md"
    write_whole(path, text)
    print(path)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
