"""What rows that share the reading of weights cost: passes of ordinary decoding, and padded ones over 1 to 8 rows.

python -m benchmarks.rows --model random:300m --dtype bfloat16 --rounds 20 --json figures.json
"""

import argparse
import time
from contextlib import ExitStack
from functools import partial

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, new_parser, positive, run, table_of
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.stage.layer_range import LayerRange

ROWS = (1, 2, 4, 8)
_OTHERS = {"uncompiled": {"compile": False}, "compiled": {"compile": True}}


def measure(options: argparse.Namespace) -> Figures:
    """Milliseconds of a pass through all layers and the head, of each kind in turn, a round each."""
    threads = options.threads
    with model_folder(options.model) as model, ExitStack() as open_ones, cpu_threads(threads):
        opened = partial(OrdinaryDecoding, model, dtype=options.dtype, threads=threads)
        padded = open_ones.enter_context(opened(rows_share_weights=True))
        ways = {f"padded, {rows} rows": (padded.stage, rows) for rows in ROWS}
        for name, settings in _OTHERS.items():
            ways[f"{name}, one row"] = (open_ones.enter_context(opened(**settings)).stage, 1)
        for stage, _ in ways.values():
            stage.begin(options.tokens + max(ROWS))
            stage.run(0, stage.num_layers, [1 + i % 200 for i in range(options.tokens)], 0)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(1 + options.rounds):  # the first one warms up
            for name, (stage, rows) in ways.items():
                times[name].append(_pass_ms(stage, rows, options.tokens))
        passes = [{"pass": name, "rows": ways[name][1], "ms": found[1:]} for name, found in times.items()]
        of = {"model": options.model, "dtype": padded.dtype, "threads": threads, "tokens": options.tokens}
        return {**of, "shares": padded.stage.rows_of_a_pass is not None, "passes": passes}


def _pass_ms(stage: LayerRange, rows: int, position: int) -> float:
    """Run a chain of `rows` tokens behind the text, with their logits, and forget it."""
    began = time.perf_counter()
    stage.token_logits(stage.run(0, stage.num_layers, [5] * rows, position))
    ended = time.perf_counter()
    stage.truncate(position)
    return 1000 * (ended - began)


def table(figures: Figures) -> str:
    """A row for each kind of pass; ratios are of the shortest times, and per row."""
    one = min(next(row["ms"] for row in figures["passes"] if row["pass"].startswith("uncompiled")))
    rows = [
        {**row, "least": round(min(row["ms"]), 1), "ratio": round(min(row["ms"]) / one / row["rows"], 2)}
        for row in figures["passes"]
    ]
    title = f"{figures['model']}, {figures['dtype']}, {figures['tokens']} tokens before, threads: {figures['threads']}"
    heads = {"least": "shortest, ms", "ms": "ms", "ratio": "a row's time, as a share of an uncompiled pass of one"}
    return table_of(rows, **{"pass": title}, **heads)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="random:300m", help=MODEL_HELP)
    found.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    found.add_argument("--rounds", type=positive, default=20, help="passes of each kind")
    found.add_argument("--tokens", type=positive, default=200, help="of the text before, at most 256")
    found.add_argument("--threads", type=positive, default=1, help="CPU threads")
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
