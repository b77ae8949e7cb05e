"""The time to the first token of a long prompt: ordinary decoding's beside the staged layout's, in turn.

    python -m benchmarks.first_token --tokens 1500 --stages 2 --rounds 9

The prompts' tokens are drawn at random, others each time; the first round is dropped. Stages work on different chunks
of a prompt at once: of N stages' C chunks each, C + N − 1 follow one another. With --emulate-layer-ms a chunk takes
that time in each layer, or longer where computing it does.

In a round ordinary decoding has two prompts in a row, and then the stages have both of them. The first finds caches
that are full of the other's weights, and cores that have idled beside it, which are slow for a while; the second is
what a program sees that decodes in one way only. Each has a row of its own. The last column is how many times as long
the stages' cores take at once as alone, for nothing but hashes: above 1 they are at times not cores of their own.
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks.models import model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.models.stage.chunks import prompt_chunks
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.tune.comparison.in_turn import cores_of, on_core_of
from ppd_runtime.tune.machine_load import slowdown_at_once
from ppd_runtime.tune.quartiles import quartiles

_BEFORE = "a prompt of the other's", "one of its own"


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    params, generator = SamplingParams(max_new_tokens=2, ignore_eos=True), torch.Generator().manual_seed(0)
    device = None if options.emulate_layer_ms is None else EmulatedDevice(options.emulate_layer_ms)
    place = {"dtype": options.dtype, "compile": options.compile, "emulate": device}
    rows: list[list[tuple[float, float]]] = [[], []]
    at_once: list[float] = []
    same = True
    with model_folder(options.model) as model:
        ordinary = OrdinaryDecoding(model, **place)
        with PPDRuntime(model, stages=options.stages, launcher=options.launcher, **place) as runtime:
            for turn in range(options.rounds + 1):
                at_once.append(slowdown_at_once(cores_of(runtime)))
                drawn = torch.randint(ordinary.info.vocab_size, (len(rows), options.tokens), generator=generator)
                prompts = drawn.tolist()
                with on_core_of(runtime):
                    expected = [ordinary.generate(prompt, params) for prompt in prompts]
                got = [runtime.generate(prompt, params) for prompt in prompts]
                for times, ours, theirs in zip(rows, expected, got, strict=True):
                    if turn:
                        times.append((ours.stats.time_to_first_token_s, theirs.stats.time_to_first_token_s))
                    same = same and ours.token_ids == theirs.token_ids
    num_chunks = len(prompt_chunks(options.tokens, ordinary.info.longest_in_chunks))
    return {
        "model": options.model,
        "tokens": options.tokens,
        "chunks": num_chunks,
        "stages": options.stages,
        "compiled": options.compile,
        "emulated_layer_ms": options.emulate_layer_ms,
        "rows": [_row(before, times) for before, times in zip(_BEFORE, rows, strict=True)],
        "least_ratio": (num_chunks + options.stages - 1) / (num_chunks * options.stages),
        "identical": same,
        "slowdown_at_once": at_once,
    }


def _row(before: str, times: Sequence[tuple[float, float]]) -> Figures:
    """Of prompts that followed the same: seconds of ordinary decoding and of the stages, by round."""
    ratios = [theirs / ours for ours, theirs in times]
    return {
        "before": before,
        "ordinary_ms": [1000 * ours for ours, _ in times],
        "staged_ms": [1000 * theirs for _, theirs in times],
        "ratio": quartiles(ratios)[1],
        "ratios": ratios,
    }


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    columns = ["prompt", "after", "ordinary, ms to the first token", "stages", "theirs", "ratio"]
    columns += ["chunks", "they allow", "same tokens", "cores at once, × alone"]
    emulated = figures["emulated_layer_ms"]
    devices = "" if emulated is None else f", EMULATED devices of {emulated:g} ms a layer"
    rows = [
        [
            f"{figures['tokens']} tokens{devices}",
            row["before"],
            spread(row["ordinary_ms"]),
            figures["stages"],
            spread(row["staged_ms"]),
            spread(row["ratios"]),
            figures["chunks"],
            figures["least_ratio"],
            figures["identical"],
            spread(figures["slowdown_at_once"]),
        ]
        for row in figures["rows"]
    ]
    return markdown(columns, rows)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo")
    found.add_argument("--tokens", type=positive, default=1500, help="of the prompt")
    found.add_argument("--stages", type=positive, default=2)
    found.add_argument("--rounds", type=positive, default=9)
    found.add_argument("--dtype", default="float32")
    found.add_argument("--launcher", default="processes")
    found.add_argument("--compile", action="store_true")
    found.add_argument("--emulate-layer-ms", type=float)
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
