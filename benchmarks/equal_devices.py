"""The same number of devices, used in several ways: tensor parallel, pipelined, or as stages; beside one device alone.

    python -m benchmarks.equal_devices --devices 2 --json figures.json
    python -m benchmarks.equal_devices --devices 4 --emulate-layer-ms 3 --compile --match-rate 0.8

A device is a CPU core here, and tensor parallelism is ordinary decoding with a thread on each core. Runs are paired and
in turn, the first round is dropped; tokens per second are those after the first token, medians with quartiles.

With --emulate-layer-ms devices are EMULATED: a pass takes that time a layer, however many rows it has. On N of them
tensor parallelism is one process whose layers take 1/N of the time and two all-reduces of --all-reduce-ms.
"""

import argparse
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.keep_cores_awake import keep_cores_awake
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.pipeline import PROMPTS, exit_head, woken_at_once
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.cost_model.staged import GPT_FAST_ALL_REDUCE_MS
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.results import GenerationResult

ONE, PARALLEL, PIPELINED, STAGED = "1 device, ordinary", "tensor parallel", "PPD", "stages"


def measure(options: argparse.Namespace) -> Figures:
    """A row for each way of using the devices."""
    available = sorted(os.sched_getaffinity(0))
    _check(options, len(available))
    with contextlib.ExitStack() as stack:
        if options.emulate_layer_ms is not None:
            stack.enter_context(woken_at_once())
            stack.enter_context(keep_cores_awake())
        ways = _ways(options, stack)
        prompts = [ways[ONE].tokenizer.encode(prompt) for prompt in PROMPTS]
        results: defaultdict[str, list[GenerationResult]] = defaultdict(list)
        for turn in range(options.rounds + 1):
            for prompt, (way, generator) in itertools.product(prompts, ways.items()):
                with on_cores(available[: 1 if way == ONE else options.devices]):
                    result = generator.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                results[way] += [result] if turn else []
    return {
        "model": options.model,
        "devices": options.devices,
        "k": options.k,
        "rows_a_pass": options.rows,
        "emulated_layer_ms": options.emulate_layer_ms,
        "rows": _rows(results, options.devices),
    }


def _check(options: argparse.Namespace, cores: int) -> None:
    """Raise ValueError for devices that there are not, and the like."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    if options.devices < 2:
        raise ValueError(f"--devices {options.devices}: give at least 2")
    if options.emulate_layer_ms is None and options.devices > cores:
        choice = f"give 2 to {cores}, or --emulate-layer-ms"
        raise ValueError(f"--devices {options.devices}: a device is a core and there are {cores}, {choice}")


def _ways(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, TextGenerator]:
    """Generators by what they make of the devices."""
    model, devices = stack.enter_context(model_folder(options.model)), options.devices
    settings = {"dtype": options.dtype, "device": "cpu", "compile": options.compile}
    device = split = None
    if (layer_ms := options.emulate_layer_ms) is not None:
        device = EmulatedDevice(layer_ms)
        split = EmulatedDevice(layer_ms / devices + 2 * options.all_reduce_ms)
    one = OrdinaryDecoding(model, emulate=device, **settings)
    settings["dtype"] = str(one.stage.model.dtype).removeprefix("torch.")  # "auto" may depend on the threads
    parallel = OrdinaryDecoding(model, threads=1 if split else devices, emulate=split, **settings)
    head = exit_head(options, one, [one.tokenizer.encode(prompt) for prompt in PROMPTS])
    settings |= {"launcher": "processes", "exit_head": head, "emulate": device}
    pipelined = PPDRuntime(model, k=devices - 1, **settings)
    staged = PPDRuntime(model, stages=devices, k=options.k, rows=options.rows, **settings)
    return {
        ONE: one,
        PARALLEL: parallel,
        PIPELINED: stack.enter_context(pipelined),
        STAGED: stack.enter_context(staged),
    }


def table(figures: Figures) -> str:
    """The rows in Markdown."""
    emulated = figures["emulated_layer_ms"]
    conditions = "" if emulated is None else f", EMULATED devices of {emulated:g} ms a layer"
    columns = [
        "model",
        "devices",
        "way" + conditions,
        "tokens per second (quartiles)",
        "per second and device",
        "match rate",
    ]
    rows = [
        [
            figures["model"],
            row["devices"],
            f"{row['way']}, k={figures['k']}, rows={figures['rows_a_pass']}" if row["way"] == STAGED else row["way"],
            spread(row["tokens_per_second"]),
            spread([value / row["devices"] for value in row["tokens_per_second"]]),
            row["match_rate"],
            row["identical"],
        ]
        for row in figures["rows"]
    ]
    return markdown([*columns, "tokens identical to one device's"], rows)


def _rows(results: dict[str, list[GenerationResult]], devices: int) -> list[Figures]:
    texts = [result.token_ids for result in results[ONE]]
    return [
        {
            "way": way,
            "devices": 1 if way == ONE else devices,
            "tokens_per_second": [1 / result.stats.time_per_token_s for result in of_way],
            "match_rate": _match_rate(of_way) if way == PIPELINED else None,
            "identical": [result.token_ids for result in of_way] == texts,
        }
        for way, of_way in results.items()
    ]


def _match_rate(results: Sequence[GenerationResult]) -> float:
    hits = sum(result.stats.hits for result in results)
    return hits / (hits + sum(result.stats.misses for result in results))


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--devices", type=positive, default=2, help="CPU cores")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tokens", type=positive, default=128, help="new tokens for each prompt")
    options.add_argument("--rounds", type=positive, default=7, help="paired runs of every prompt")
    options.add_argument("--k", type=positive, default=3, help="candidates at each boundary of the stages")
    options.add_argument("--rows", type=positive, default=1, help="of a stage's pass, at the most")
    options.add_argument("--compile", action="store_true", help="compiled passes in every way")
    options.add_argument("--emulate-layer-ms", type=float, help="devices that take so long for a layer")
    options.add_argument(
        "--all-reduce-ms", type=float, default=GPT_FAST_ALL_REDUCE_MS[-1], help="of emulated tensor parallelism"
    )
    options.add_argument("--match-rate", type=float, help="an exit head that is right with this probability")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
