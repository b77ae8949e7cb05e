"""The same number of devices, used in two ways: tensor parallel, or pipelined; beside one device decoding alone.

    python -m benchmarks.equal_devices --devices 2 --json figures.json

A device is a CPU core here, and tensor parallelism is ordinary decoding with a thread on each core. Runs are paired and
in turn, the first round is dropped; tokens per second are those after the first token, medians with quartiles.
"""

import argparse
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.models import model_folder
from benchmarks.pipeline import PROMPTS, exit_head
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.results import GenerationResult

ONE, PARALLEL, PIPELINED = "1 device, ordinary", "tensor parallel", "PPD"


def measure(options: argparse.Namespace) -> Figures:
    """A row for each way of using the devices."""
    available = sorted(os.sched_getaffinity(0))
    cores = available[: options.devices]
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    if not 2 <= options.devices <= len(available):
        most = len(available)
        raise ValueError(f"--devices {options.devices}: a device is a core and there are {most}, give 2 to {most}")
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(model_folder(options.model))
        settings = {"dtype": options.dtype, "device": "cpu"}
        one = OrdinaryDecoding(model, **settings)
        settings["dtype"] = str(one.stage.model.dtype).removeprefix("torch.")  # "auto" may depend on the threads
        parallel = OrdinaryDecoding(model, threads=options.devices, **settings)
        prompts = [one.tokenizer.encode(prompt) for prompt in PROMPTS]
        head, k = exit_head(options, one, prompts), options.devices - 1
        runtime = stack.enter_context(PPDRuntime(model, k=k, launcher="processes", exit_head=head, **settings))
        ways = ((ONE, one, cores[:1]), (PARALLEL, parallel, cores), (PIPELINED, runtime, cores))
        results: defaultdict[str, list[GenerationResult]] = defaultdict(list)
        for turn in range(options.rounds + 1):
            for prompt, (way, generator, place) in itertools.product(prompts, ways):
                with on_cores(place):
                    result = generator.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                results[way] += [result] if turn else []
    return {"model": options.model, "devices": options.devices, "rows": _rows(results, options.devices)}


def table(figures: Figures) -> str:
    """The rows in Markdown."""
    columns = ["model", "devices", "way", "tokens per second (quartiles)", "per second and device", "match rate"]
    rows = [
        [
            figures["model"],
            row["devices"],
            row["way"],
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
    options.add_argument("--model", default="demo", help='a folder, a hub name, "demo" or random:HIDDENxLAYERS')
    options.add_argument("--devices", type=positive, default=2, help="CPU cores")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tokens", type=positive, default=128, help="new tokens for each prompt")
    options.add_argument("--rounds", type=positive, default=7, help="paired runs of every prompt")
    options.add_argument("--match-rate", type=float, help="an exit head that is right with this probability")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
