"""All that is to be learned from one GPU, each stage in a process of its own.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --stages bits,llama
    python -m benchmarks.gpu --out DIR --pretend

DIR gets stages.jsonl, a line as soon as a stage has ended or its time is up, with the rows that it had found by then,
and report.md, written again behind each stage. Whatever a stage does, the others run; the exit code is 1 where one
failed. --pretend runs every stage on the CPU with little models: its figures mean nothing. Speed-ups of pipelines
cannot be measured on one GPU, whose workers take turns; `ppd plan --devices` predicts them.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.gpu.processes import Line, run_stage
from benchmarks.gpu.report import report

STAGES = {
    "versions": ("parts", 180),  # nothing that is imported is in memory yet
    "bits": ("bits", 500),
    "sampler": ("parts", 90),
    "pipelines": ("pipelines", 360),
    "hops": ("pipelines", 180),
    "llama": ("llama", 400),
}
"""Each stage's module, and the seconds after which it is ended: several times of what it should take."""
_PATIENCE = 10
"""Times that, of a machine that only pretends and may be busy."""


def main() -> None:
    """Run the stages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--pretend", action="store_true", help="on the CPU, in small")
    parser.add_argument("--stages", default=",".join(STAGES), help="with commas; default: all")
    options = parser.parse_args()
    asked = options.stages.split(",")
    if unknown := set(asked) - set(STAGES):
        parser.error(f"--stages: {min(unknown)!r} is none of {', '.join(STAGES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    results = options.out / "stages.jsonl"
    results.write_text("")
    for name in asked:
        module, deadline_s = STAGES[name]
        deadline_s *= _PATIENCE if options.pretend else 1
        lines.append(run_stage(name, f"benchmarks.gpu.{module}", options.out, options.pretend, deadline_s))
        with results.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        (options.out / "report.md").write_text(report(lines))
        print(f"{name}: {lines[-1]['error'] or 'done'}, {lines[-1]['seconds']:.0f} s", flush=True)
    sys.exit(any(line["error"] for line in lines))


if __name__ == "__main__":
    main()
