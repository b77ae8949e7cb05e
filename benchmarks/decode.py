"""The time of one ordinary decoding step against its floor, eager and compiled, and transformers' `generate`.

    python -m benchmarks.decode --model random:512x12 --json figures.json

The floor is the time of the step's matrix products alone: every linear layer's product with a one-token vector. The
bandwidth floor is the time in which as many bytes as those weights have, in the format in which the way reads them, can
be read here. All run in turn, in one process on one core, over the same positions; the first round is dropped. Ratios
are medians of the rounds' own ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.floor import Products, Reading
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.pipeline import transformers_time_per_token
from benchmarks.recording import Figures, markdown, mean_ledger_ms, new_parser, positive, run
from ppd_runtime.config import DTYPES
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.dtype import choose_dtype
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.library import is_available
from ppd_runtime.models.native.products import in_half_the_memory
from ppd_runtime.models.opening import load_stage
from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.sampling import TimedSampler
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tracing.breakdown import LatencyBreakdown
from ppd_runtime.tune.quartiles import quartiles

WAYS = ("eager", "compiled")
_PROMPT = list(range(20, 36))


def stage_time(stage: Stage, num_tokens: int, ledgers: list[LatencyBreakdown]) -> float:
    """Seconds for a greedy token after the first: layers, final norm, head and the choice; `ledgers` gets its parts."""
    sampler, history = TimedSampler(SamplingParams(), stage.recorder), list(_PROMPT)
    stage.begin(len(_PROMPT) + num_tokens)
    token = sampler.choose(stage.logits(stage.run(0, stage.num_layers, _PROMPT, 0)), history)
    stage.recorder.begin()
    before, began = stage.recorder.ledger(), time.perf_counter()
    for position in range(len(_PROMPT), len(_PROMPT) + num_tokens - 1):
        history.append(token)
        token = sampler.choose(stage.logits(stage.run(0, stage.num_layers, [token], position)), history)
    stage.recorder.pause()
    ledgers.append(stage.recorder.ledger().per_token_since(before, num_tokens - 1))
    return (time.perf_counter() - began) / (num_tokens - 1)


@torch.inference_mode()
def floor_time(model: PreTrainedModel, num_tokens: int) -> float:
    """Seconds for the matrix products of one token."""
    products = Products(model)
    began = time.perf_counter()
    for _ in range(num_tokens - 1):
        products.run()
    return (time.perf_counter() - began) / (num_tokens - 1)


def measure(options: argparse.Namespace) -> Figures:
    """Run everything in turn, on one core; the figures by name."""
    for name, value in (("--tokens", options.tokens), ("--rounds", options.rounds)):
        if value < 2:
            raise ValueError(f"{name} {value}: give at least 2")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with model_folder(options.model) as model, on_cores([max(os.sched_getaffinity(0))]):
            return _measure(options, describe(model))
    finally:
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, info: ModelInfo) -> Figures:
    dtype = choose_dtype(options.dtype, "cpu", info)
    eager = load_stage(info, info.num_layers, dtype, "cpu")
    began = time.perf_counter()
    compiled = load_stage(info, info.num_layers, dtype, "cpu", compile_ahead(info, dtype, "cpu"))
    start_s = time.perf_counter() - began
    library = AutoModelForCausalLM.from_pretrained(info.folder, dtype=dtype).eval()
    ledgers: dict[str, list[LatencyBreakdown]] = {"eager": [], "compiled": []}
    read = {"eager": Products(eager.model).num_bytes, "compiled": _compiled_bytes(compiled.model)}
    readings = {way: Reading(num_bytes) for way, num_bytes in read.items()}
    runs: dict[str, Callable[[], float]] = {
        "floor": lambda: floor_time(eager.model, options.tokens),
        "eager": lambda: stage_time(eager, options.tokens, ledgers["eager"]),
        "compiled": lambda: stage_time(compiled, options.tokens, ledgers["compiled"]),
        "reading, eager": lambda: readings["eager"].seconds(options.tokens - 1),
        "reading, compiled": lambda: readings["compiled"].seconds(options.tokens - 1),
        "transformers": lambda: transformers_time_per_token(library, _PROMPT, options.tokens),
    }
    rounds = [{name: run() for name, run in runs.items()} for _ in range(options.rounds + 1)][1:]
    figures = {way: _figures(rounds, way) | {"ledger_ms": mean_ledger_ms(ledgers[way][1:])} for way in ledgers}
    return {
        "model": options.model,
        "dtype": str(dtype).removeprefix("torch."),
        **figures,
        "compiled_start_s": start_s,
        "tokens": options.tokens,
        "rounds": options.rounds,
    }


def _compiled_bytes(model: PreTrainedModel) -> int:
    """Of the weights as compiled passes read them: in bfloat16 where that changes no number."""
    weights = Products(model).weights
    if not is_available(model.device, model.dtype):
        return sum(weight.nbytes for weight in weights)
    halves = ((weight, in_half_the_memory(weight)) for weight in weights)
    return sum(weight.nbytes if half is None else half.nbytes for weight, half in halves)


def _figures(rounds: list[dict[str, float]], way: str) -> Figures:
    def median_ms(name: str) -> float:
        return statistics.median(times[name] for times in rounds) * 1000

    to_floor = [times[way] / times["floor"] for times in rounds]
    reading = f"reading, {way}"
    return {
        "step_ms": median_ms(way),
        "floor_ms": median_ms("floor"),
        "ratio_to_floor": statistics.median(to_floor),
        "ratio_quartiles": quartiles(to_floor),
        "bandwidth_floor_ms": median_ms(reading),
        "share_of_bandwidth": statistics.median(times[reading] / times[way] for times in rounds),
        "hf_ms": median_ms("transformers"),
        "ratio_to_hf": statistics.median(times[way] / times["transformers"] for times in rounds),
    }


def table(figures: Figures) -> str:
    """A row for each way, in Markdown."""
    columns = ["model", "dtype", "way", "ms a token", "floor, ms", "ratio to the floor", "quartiles"]
    columns += ["bandwidth floor, ms", "share of the bandwidth"]
    columns += ["transformers `generate`, ms", "ratio to it"]
    rows = [
        [
            figures["model"],
            figures["dtype"],
            way,
            *(figures[way][name] for name in ("step_ms", "floor_ms", "ratio_to_floor")),
            f"{figures[way]['ratio_quartiles'][0]:.3f} to {figures[way]['ratio_quartiles'][2]:.3f}",
            *(figures[way][name] for name in ("bandwidth_floor_ms", "share_of_bandwidth", "hf_ms", "ratio_to_hf")),
        ]
        for way in WAYS
    ]
    return markdown(columns, rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--dtype", choices=DTYPES, default="auto")
    options.add_argument("--tokens", type=positive, default=64, help="new tokens in each run, two at least")
    options.add_argument("--rounds", type=positive, default=15, help="paired runs, two at least")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
