"""The time from a command to its first output, cold and warm, and to the first token of a long prompt.

    python -m benchmarks.startup --rounds 3 --json figures.json
    python -m benchmarks.startup --only "help; stages=2" --prompt-tokens 1500

Cold: the files of Python's packages and of the model have been dropped from the system's page cache, as far as no
other program holds them, and the user's cache folder, which keeps compiled code, is empty. Warm: all of it is there.
The long prompt's tokens are drawn at random. Two in a row run in each way, of which the second counts: a way's first
prompt behind another's finds caches full of other weights.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, names, new_parser, positive, run, table_of
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch.cpu_affinity import on_cores

_GENERATE = ["generate", "def read_lines(path):", "--max-new-tokens=8"]
COMMANDS = {
    "help": ["--help"],
    "tradeoff": ["tradeoff", "--layers=40", "--exit-layer=20", "--k=1,3,5", "--match-rate=0.68", "--tokens=128"],
    "ordinary": [*_GENERATE, "--method=autoregressive"],
    "eager": [*_GENERATE, "--method=autoregressive", "--no-compile"],
    "k=1, threads": [*_GENERATE, "--k=1", "--transport=local"],
    "k=3": [*_GENERATE, "--k=3", "--launcher=processes"],
    "k=3, ray": [*_GENERATE, "--k=3", "--launcher=ray"],
    "stages=2": [*_GENERATE, "--stages=2", "--launcher=processes"],
}
_DEADLINE_S = 600


def measure(options: argparse.Namespace) -> Figures:
    """A row for each command, and the long prompt's times."""
    rows = [{"command": name, "seconds": list(_seconds(name, options))} for name in options.only]
    return {"model": options.model, "rows": rows, "tokens": options.prompt_tokens, "long": _long_prompts(options)}


def _seconds(name: str, options: argparse.Namespace) -> Iterator[float]:
    """One cold start, then the warm ones."""
    model = [f"--model={options.model}"] * (COMMANDS[name][0] == "generate")
    command = [sys.executable, "-m", "ppd_runtime.cli.entry", *COMMANDS[name], *model]
    with tempfile.TemporaryDirectory(prefix="ppd-cache-") as cache:
        _drop_from_page_cache()
        for _ in range(1 + options.rounds):
            began, environment = time.perf_counter(), os.environ | {"XDG_CACHE_HOME": cache}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
                first = process.stdout.read(1)
                yield time.perf_counter() - began
                _, errors = process.communicate(timeout=_DEADLINE_S)
            if not first or process.returncode:
                raise RuntimeError(f"{name}: {errors.decode().strip().splitlines()[-1:]}")


def _drop_from_page_cache() -> None:
    """Ask the system to forget the contents of Python's packages and of this project's files."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1])}:
        for root, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(root, name) for name in files):
                if path.is_file():
                    file = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)


def _long_prompts(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds to the first token, ordinary decoding's and two stages', a pair a round; a first round is dropped."""
    generator, found, ask = torch.Generator().manual_seed(0), list[tuple[float, float]](), {"max_new_tokens": 2}
    if not options.prompt_tokens:
        return []
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(model_folder(options.model))
        ordinary = stack.enter_context(OrdinaryDecoding(model))
        runtime = stack.enter_context(PPDRuntime(model, stages=2, launcher="processes"))
        for _ in range(1 + options.rounds):
            size = (2, options.prompt_tokens)
            prompts = torch.randint(ordinary.info.vocab_size, size, generator=generator).tolist()
            with on_cores(runtime.main_cores):
                ours = [ordinary.generate(prompt, **ask) for prompt in prompts]
            theirs = [runtime.generate(prompt, **ask) for prompt in prompts]
            found.append((ours[1].stats.time_to_first_token_s, theirs[1].stats.time_to_first_token_s))
    return found[1:]


def table(figures: Figures) -> str:
    """A row a command, and one of the long prompt."""
    rows = [
        {"command": row["command"], "cold": row["seconds"][0], "warm": row["seconds"][1:]} for row in figures["rows"]
    ]
    tables = [table_of(rows, command=f"first output, {figures['model']}", cold="cold, s", warm="warm, s")]
    if pairs := figures["long"]:
        ours, theirs = ([1000 * seconds for seconds in one] for one in zip(*pairs, strict=True))
        ratios = [late / early for early, late in zip(ours, theirs, strict=True)]
        row = {"prompt": f"{figures['tokens']} tokens", "ours": ours, "theirs": theirs, "ratios": ratios}
        heads = {"prompt": "prompt", "ours": "ordinary, ms to the first token", "theirs": "2 stages", "ratios": "ratio"}
        tables.append(table_of([row], **heads))
    return "\n\n".join(tables)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo", help=MODEL_HELP)
    found.add_argument("--rounds", type=positive, default=3, help="warm starts of each, and rounds of the long prompt")
    found.add_argument(
        "--only", type=names(COMMANDS, ";"), default=list(COMMANDS), help=f"some of the commands: {'; '.join(COMMANDS)}"
    )
    found.add_argument("--prompt-tokens", type=int, default=1500, help="of the long prompt; 0: none")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
