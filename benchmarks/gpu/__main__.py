"""All that is to be learned from one GPU, each stage in a process of its own.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --stages bits,llama
    python -m benchmarks.gpu --out DIR --pretend

DIR gets stages.jsonl, a line as soon as a stage has ended or its time is up, with the rows that it had found by then,
and report.md, written again behind each stage. Whatever a stage does, the others run; the exit code is 1 where one
failed. --pretend runs every stage on the CPU with little models: its figures mean nothing. Speed-ups of pipelines
cannot be measured on one GPU, whose workers take turns; `ppd plan --devices N --row-cost 1` predicts them: on GPUs the
runtime runs each row as a pass of its own.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import Line, run_stage
from benchmarks.recording import names
from ppd_runtime.tune.tables import markdown_table

STAGES = {
    "versions": ("parts", 180),  # nothing that is imported is in memory yet
    "bits": ("passes", 500),
    "products": ("parts", 240),
    "hops": ("parts", 400),
    "llama": ("passes", 400),
}
"""Each stage's module, and the seconds after which it is ended: several times of what it should take."""
_PATIENCE = 10
"""Times that, of a machine that only pretends and may be busy."""


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """A section for each stage, with its tables and what went wrong."""
    now = datetime.datetime.now(datetime.timezone.utc)
    pretend = any(line["pretend"] for line in lines)
    parts = ["# Figures of one GPU", f"{now:%Y-%m-%d %H:%M} UTC, `python -m benchmarks.gpu{' --pretend' * pretend}`."]
    if pretend:
        parts.append("PRETENDED on a CPU with little models: no figure below means anything.")
    failed = [line["stage"] for line in lines if line["error"]]
    wrong = [line["stage"] for line in lines if any(row.get("equal") is False for row in line["rows"])]
    parts.append(
        f"Failed: {', '.join(failed) or 'none'}. Not equal where they should be: {', '.join(wrong) or 'none'}."
    )
    for line in lines:
        parts.append(f"## {line['stage']}, {line['seconds']:.0f} s")
        parts += [f"FAILED: {line['error']}"] * bool(line["error"])
        parts += _tables(line["rows"])
    return "\n\n".join(parts) + "\n"


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of the same columns make one table."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    return [markdown_table(columns, [list(row.values()) for row in found], ".4g") for columns, found in kinds.items()]


def main() -> None:
    """Run the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--pretend", action="store_true", help="on the CPU, in small")
    parser.add_argument("--stages", type=names(STAGES), default=list(STAGES), help="with commas; default: all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    results = options.out / "stages.jsonl"
    results.write_text("")
    for name in options.stages:
        module, deadline_s = STAGES[name]
        deadline_s *= _PATIENCE if options.pretend else 1
        lines.append(run_stage(name, f"benchmarks.gpu.{module}", options.pretend, deadline_s))
        with results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        (options.out / "report.md").write_text(report(lines))
        print(f"{name}: {lines[-1]['error'] or 'done'}, {lines[-1]['seconds']:.0f} s", flush=True)
    sys.exit(any(line["error"] for line in lines))


if __name__ == "__main__":
    main()
