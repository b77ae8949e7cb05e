"""`ppd serve` under guidellm, a load generator of others: so many requests at once, or arriving at a rate.

    python -m benchmarks.serve_guidellm --stages 2 --compile --at-once 1,2,4,8,16 --rates 1,2,4

It needs guidellm as a program, in an environment of its own since it pins other versions than this project:
`python3 -m venv ENV && ENV/bin/pip install guidellm`, then `--guidellm ENV/bin/guidellm`. Prompts are guidellm's
synthetic text, arrivals at a rate are random (Poisson), and all figures are those that it measures.
"""

import argparse
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recording import Figures, markdown, run
from benchmarks.serve import load_name, load_options, served
from ppd_runtime.models.checkpoint.description import describe

_DEADLINE_S = 3600.0


def measure(options: argparse.Namespace) -> Figures:
    """Run all loads; the figures by load.

    Raises:
        ValueError: where guidellm is not there, or ends with an error.
    """
    loads: list[Figures] = []
    with tempfile.TemporaryDirectory() as folder, served(options, options.stages) as server:
        for profile, field, values in (
            ("concurrent", "streams", options.at_once),
            ("poisson", "rate", options.rates),
        ):
            if values:
                loads += _loaded(options, server.url, profile, field, values, Path(folder) / f"{profile}.json")
    shape = {name: getattr(options, name) for name in ("model", "stages", "tokens", "prompt_tokens")}
    return {**shape, "compiled": options.compile, "loads": loads}


def _loaded(
    options: argparse.Namespace, url: str, profile: str, field: str, values: Sequence[float], report: Path
) -> list[Figures]:
    model = describe(options.model)
    given = {
        "backend": f"kind=openai_http,target={url},model={model.name},request_format=/v1/completions",
        "tokenizer": f"kind=hf_auto,model={model.folder}",
        "profile": f"kind={profile},{field}={values[0]}",
        "constraint": f"kind=max_requests,count={options.requests}",
        "data": f"kind=synthetic_text,prompt_tokens={options.prompt_tokens},output_tokens={options.tokens}",
        "output": f"kind=json,path={report}",
    }
    command = [*shlex.split(options.guidellm), "run", "--disable-console"]
    command += [part for name, value in given.items() for part in (f"--{name}", value)]
    command += ["--override", f"profile.{field}", ",".join(map(str, values))]
    try:
        ended = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_DEADLINE_S, env=_offline(), cwd=report.parent
        )
    except OSError as error:
        raise ValueError(f"--guidellm {options.guidellm}: {error.strerror}; install guidellm, or say where") from error
    if ended.returncode or not report.exists():
        raise ValueError(f"guidellm ended with {ended.returncode}: {ended.stderr[-500:] or ended.stdout[-500:]}")
    told = json.loads(report.read_text())["benchmarks"]
    return [_figures(profile, value, one) for value, one in zip(values, told, strict=True)]


def _offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


def _figures(profile: str, value: float, told: Figures) -> Figures:
    found = told["metrics"]
    return {
        "loop": "closed" if profile == "concurrent" else "open",
        "at_once" if profile == "concurrent" else "rate": value,
        "requests": found["request_totals"]["total"],
        "failed": found["request_totals"]["errored"],
        "tokens_per_second": found["output_token_count"]["successful"]["total_sum"] / told["duration"],
        "first_token_ms": _quartiles(found["time_to_first_token_ms"]),
        "between_tokens_ms": _quartiles(found["inter_token_latency_ms"]),
    }


def _quartiles(told: Figures) -> list[float]:
    return [told["successful"]["percentiles"][name] for name in ("p25", "p50", "p75")]


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    rows = [
        [
            load_name(load),
            load["requests"],
            load["failed"],
            f"{load['tokens_per_second']:.1f}",
            *("{1:.3g} ({0:.3g} to {2:.3g})".format(*load[name]) for name in ("first_token_ms", "between_tokens_ms")),
        ]
        for load in figures["loads"]
    ]
    return markdown(["load", "requests", "failed", "tokens/s", "first token, ms", "between tokens, ms"], rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = load_options(__doc__)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--guidellm", default="guidellm", help="the program, or a command that runs it")
    return made


if __name__ == "__main__":
    run(parser(), measure, table)
