"""What passes over several tokens cost: the products alone, by PyTorch and by our own code, and whole compiled passes.

    python -m benchmarks.passes --tokens 1,2,4,8 --json figures.json
    python -m benchmarks.passes --weights int8

Products are those of all linear layers but the head; passes are over a chain of tokens behind a text
of `--position` tokens. All in turn, on one core, in float32; medians, the first round dropped. The last column tells
whether a pass gives the bits of its tokens run one by one. The ways read other copies of the weights: of a model that
fits the processor's caches, what one of them reads pushes the others' out.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run, whole_numbers
from ppd_runtime.config import FORMATS
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.compiled.export import MOST_SEVERAL
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.native.linear import QuantisedLinear
from ppd_runtime.models.native.products import LargePages, in_half_the_memory, product
from ppd_runtime.models.opening import load_stage
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.stage import Stage

Way = Callable[[int, int], object]
"""Runs so many tokens at a position."""
_CPU = torch.device("cpu")


def measure(options: argparse.Namespace) -> Figures:
    """Run everything in turn, on one core; the figures by name."""
    if (most := max(options.tokens)) > MOST_SEVERAL:
        raise ValueError(f"--tokens {most}: compiled passes are over {MOST_SEVERAL} tokens at the most")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with model_folder(options.model) as model, on_cores([max(os.sched_getaffinity(0))]), torch.inference_mode():
            return _measure(options, describe(model, options.weights))
    finally:
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, info: ModelInfo) -> Figures:
    code = compile_ahead(info, torch.float32, "cpu", (1, PassKind.SEVERAL))
    stage = load_stage(info, info.num_layers, torch.float32, "cpu", code)
    stage.begin(options.position + MOST_SEVERAL)
    stage.run(0, stage.num_layers, [7] * options.position, 0)
    ways = _ways(stage)
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds + 1):
        for tokens in options.tokens:
            for name, way in ways.items():
                began = time.perf_counter()
                way(tokens, options.position)
                times.setdefault((name, tokens), []).append(time.perf_counter() - began)
                stage.truncate(options.position)
    rows = [
        {
            "tokens": tokens,
            "us": {name: 1e6 * statistics.median(times[name, tokens][1:]) for name in ways},
            "same_bits": _same_bits(stage, tokens, options.position),
        }
        for tokens in options.tokens
    ]
    about = {"model": options.model, "weights": options.weights, "layers": stage.num_layers}
    return {**about, "position": options.position, "rows": rows}


def _ways(stage: Stage) -> dict[str, Way]:
    """What is timed, of a number of tokens at a position."""
    linears = [part for part in stage.model.model.modules() if isinstance(part, nn.Linear | QuantisedLinear)]
    weights, inputs = [part.weight for part in linears], [part.in_features for part in linears]
    ways: dict[str, Way] = {}
    if any(weight.dtype == torch.uint8 for weight in weights):
        ways["our own"] = _products(weights, inputs, product.bound)
    else:
        by_library = _products(weights, inputs, lambda states, weight: partial(linear, states, weight))
        ways["PyTorch's products"] = by_library
        if is_available(_CPU, torch.float32):
            pages, halves = LargePages(sum(2 * weight.numel() for weight in weights)), map(in_half_the_memory, weights)
            fitting = [pages.copy(half) for half in halves if half is not None]
            ways["our own"] = _products(weights, inputs, product.bound)
            if len(fitting) == len(weights):
                ways["our own, bfloat16"] = _products(fitting, inputs, product.bound)
    ways["a pass"] = lambda tokens, position: stage.run(0, stage.num_layers, [7] * tokens, position)
    return ways


def _products(weights: list[Tensor], inputs: list[int], bind: Callable[[Tensor, Tensor], Callable[[], object]]) -> Way:
    """All products, made ready before they are timed."""
    states = {size: torch.randn(MOST_SEVERAL, size) for size in set(inputs)}
    pairs = list(zip(weights, inputs, strict=True))
    ready = [[bind(states[size][:tokens], w) for w, size in pairs] for tokens in range(1, MOST_SEVERAL + 1)]

    def all_of_them(tokens: int, position: int) -> None:
        for one in ready[tokens - 1]:
            one()

    return all_of_them


def _same_bits(stage: Stage, tokens: int, position: int) -> bool:
    ids = list(range(20, 20 + tokens))
    together = stage.run(0, stage.num_layers, ids, position)
    stage.truncate(position)
    alone = [stage.run(0, stage.num_layers, [token], position + i) for i, token in enumerate(ids)]
    stage.truncate(position)
    return torch.equal(together, torch.cat(alone, dim=1))


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    names = list(figures["rows"][0]["us"])
    columns = [
        "model",
        "weights",
        "tokens",
        *(f"{name}, µs" for name in names),
        "a pass, over one token's",
        "the bits of each alone",
    ]
    alone = next((row["us"]["a pass"] for row in figures["rows"] if row["tokens"] == 1), None)
    rows = [
        [
            figures["model"],
            figures["weights"],
            row["tokens"],
            *(f"{row['us'][name]:.0f}" for name in names),
            row["us"]["a pass"] / alone if alone else None,
            row["same_bits"],
        ]
        for row in figures["rows"]
    ]
    return markdown(columns, rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--weights", choices=FORMATS, help="their format; default: as the model's files have them")
    options.add_argument("--tokens", type=whole_numbers, default=[1, 2, 3, 4, 6, 8], help="of a pass, with commas")
    options.add_argument("--position", type=positive, default=150, help="tokens before them")
    options.add_argument("--rounds", type=positive, default=41)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
