"""The time to the first token of a long prompt: ordinary decoding's beside the staged layout's, in turn.

    python -m benchmarks.first_token --tokens 1500 --stages 2 --rounds 9

The prompt's tokens are drawn at random, others in each round; the first round is dropped. Stages work on different
chunks of a prompt at once: of N stages' C chunks each, C + N − 1 follow one another. With --emulate-layer-ms a chunk
takes that time in each layer, or longer where computing it does.
"""

import argparse

import torch

from benchmarks.models import model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.measure.against_ordinary import on_core_of
from ppd_runtime.measure.quartiles import quartiles
from ppd_runtime.models.stage.chunks import prompt_chunks
from ppd_runtime.models.stage.emulation import EmulatedDevice


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    params, generator = SamplingParams(max_new_tokens=2, ignore_eos=True), torch.Generator().manual_seed(0)
    device = None if options.emulate_layer_ms is None else EmulatedDevice(options.emulate_layer_ms)
    place = {"dtype": options.dtype, "compile": options.compile, "emulate": device}
    times: list[tuple[float, float]] = []
    same = True
    with model_folder(options.model) as model:
        ordinary = OrdinaryDecoding(model, **place)
        with PPDRuntime(model, stages=options.stages, launcher=options.launcher, **place) as runtime:
            for turn in range(options.rounds + 1):
                prompt = torch.randint(ordinary.info.vocab_size, (options.tokens,), generator=generator).tolist()
                with on_core_of(runtime):
                    expected = ordinary.generate(prompt, params)
                got = runtime.generate(prompt, params)
                both = expected.stats.time_to_first_token_s, got.stats.time_to_first_token_s
                times += [both] if turn else []
                same = same and got.token_ids == expected.token_ids
    num_chunks = len(prompt_chunks(options.tokens, ordinary.info.longest_in_chunks))
    return {
        "model": options.model,
        "tokens": options.tokens,
        "chunks": num_chunks,
        "stages": options.stages,
        "compiled": options.compile,
        "emulated_layer_ms": options.emulate_layer_ms,
        "ordinary_ms": [1000 * ours for ours, _ in times],
        "staged_ms": [1000 * theirs for _, theirs in times],
        "ratio": quartiles([theirs / ours for ours, theirs in times])[1],
        "ratios": [theirs / ours for ours, theirs in times],
        "least_ratio": (num_chunks + options.stages - 1) / (num_chunks * options.stages),
        "identical": same,
    }


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    columns = [
        "prompt",
        "chunks",
        "ordinary, ms to the first token",
        "stages",
        "theirs",
        "ratio",
        "chunks allow",
        "same tokens",
    ]
    emulated = figures["emulated_layer_ms"]
    row = [
        f"{figures['tokens']} tokens"
        + (f", EMULATED devices of {emulated:g} ms a layer" if emulated is not None else ""),
        figures["chunks"],
        spread(figures["ordinary_ms"]),
        figures["stages"],
        spread(figures["staged_ms"]),
        spread(figures["ratios"]),
        figures["least_ratio"],
        figures["identical"],
    ]
    return markdown(columns, [row])


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
