"""Every benchmark, one after the other, and a report of them: `make bench`, or `python -m benchmarks`.

The report is DATE_MACHINE.md, with the commands, their tables, the versions and the commit; it appears when all of them
have run, or not at all.
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
_PLAN = (
    ("Start-up", "startup --rounds 2"),
    ("Hops between two processes", "hop --count 300"),
    ("The demo model", "pipeline --rounds 7"),
    ("A wider model with a set match rate", "pipeline --model random:512x12 --match-rate 0 --tokens 64 --rounds 3"),
    ("", "pipeline --model random:512x12 --match-rate 0.7 --tokens 64 --rounds 3"),
    ("", "pipeline --model random:512x12 --match-rate 1 --tokens 64 --rounds 3"),
    (_EMULATED, "pipeline --k 3 --emulate-layer-ms 3 --tokens 64 --rounds 3"),
    ("", "pipeline --k 7 --emulate-layer-ms 3 --tokens 64 --rounds 3"),
    ("", "pipeline --k 3 --emulate-layer-ms 1 --tokens 64 --rounds 5"),
    ("The same devices, used in two ways", "equal_devices --rounds 5"),
    ("", "equal_devices --model random:512x12 --match-rate 0.7 --tokens 64 --rounds 3"),
    ("The planner's predictions", "planner --exit-layers 6,8,10 --rounds 2"),
)


def report(plan: Sequence[tuple[str, str]]) -> str:
    """Run the commands of a plan, (heading, command) each; the report in Markdown."""
    where, began = environment(), time.monotonic()
    lines = [f"# {datetime.date.today()}, {where['machine']}", ""]
    lines += [f"Commit {where['commit'] or 'unknown'}. {_versions(where)}.", ""]
    lines += [
        "Warm-up dropped; compared runs are paired and in turn; medians, with quartiles where they are given.",
        "",
    ]
    for heading, command in plan:
        sys.stderr.write(f"{time.monotonic() - began:4.0f} s  {command}\n")
        lines += [f"## {heading}", ""] if heading else []
        lines += ["```", f"python -m benchmarks.{command}", "```", "", _table(command), ""]
    return "\n".join([*lines, f"All of it took {(time.monotonic() - began) / 60:.0f} minutes.", ""])


def _table(command: str) -> str:
    """Run one benchmark in a Python of its own; its table."""
    name, *options = shlex.split(command)
    with tempfile.TemporaryDirectory(prefix="ppd-bench-") as folder:
        path = Path(folder, "figures.json")
        arguments = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(path)]
        subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
        figures: Figures = json.loads(path.read_text())
    return importlib.import_module(f"benchmarks.{name}").table(figures)


def _versions(where: Figures) -> str:
    return ", ".join(f"{name} {number}" for name, number in where["versions"].items())


def main() -> None:
    """Run everything and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=_RESULTS, help="where the report goes")
    folder: Path = parser.parse_args().folder
    if not folder.is_dir():
        parser.exit(2, f"{parser.prog}: --folder {folder}: there is no such folder\n")
    path = folder / f"{datetime.date.today()}_{slug(environment())}.md"
    write_whole(path, report(_PLAN))
    print(path)


if __name__ == "__main__":
    main()
