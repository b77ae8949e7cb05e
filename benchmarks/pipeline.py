"""Ordinary decoding, pipelined decoding and transformers' `generate` on the same prompts, in turn, in one run.

    python -m benchmarks.pipeline --k 1 --rounds 7 --json figures.json

Every process stays on a core of its own where there are enough; ordinary decoding and transformers run on the main
process' core. Times are for a token after the first; the first round is dropped.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.measure.against_ordinary import on_core_of, predicted_ratio_after_first, summarise
from ppd_runtime.models.exit_heads import RehearsedHead

PROMPTS = (
    "def read_lines(path):",
    "class Reader:",
    "    def __init__(self, name, value=None):",
)


def transformers_time_per_token(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> float:
    """Seconds for a token after the first: the difference of a long and a one-token `generate`."""
    inputs = torch.tensor([prompt])

    def spent(tokens: int) -> float:
        began = time.perf_counter()
        model.generate(inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)
        return time.perf_counter() - began

    return (spent(num_tokens) - spent(1)) / (num_tokens - 1)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run everything; the figures by name."""
    ordinary = OrdinaryDecoding(options.model, dtype=options.dtype, compile=options.compile)
    prompts = [ordinary.tokenizer.encode(prompt) for prompt in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(ordinary.info.folder, dtype=ordinary.stage.model.dtype).eval()
    torch.set_num_threads(1)
    pairs, library_times = [], []
    with PPDRuntime(
        options.model,
        k=options.k,
        exit_layer=options.exit_layer,
        dtype=options.dtype,
        compile=options.compile,
        exit_head=_exit_head(options, ordinary, prompts),
    ) as runtime:
        for turn in range(options.rounds + 1):
            for prompt in prompts:
                with on_core_of(runtime):
                    expected = ordinary.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                    library = transformers_time_per_token(reference, prompt, options.tokens)
                got = runtime.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                if turn:
                    pairs.append((expected, got))
                    library_times.append(library)
        summary = summarise(runtime, pairs, options.tokens)
        ratios = [got.stats.time_per_token_s / expected.stats.time_per_token_s for expected, got in pairs]
        predicted = predicted_ratio_after_first(runtime, summary.match_rate, options.tokens)
    return {
        "autoregressive_ms": summary.ordinary_time_per_token_s * 1000,
        "ppd_ms": summary.ppd_time_per_token_s * 1000,
        "transformers_ms": statistics.median(library_times) * 1000,
        "ratio": summary.ratio,
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "predicted_ratio": predicted,
        "realised_saving": summary.realised_saving,
        "match_rate": summary.match_rate,
        "identical": summary.identical,
        "pairs": len(pairs),
        "k": options.k,
        "compiled": options.compile,
        "pinned": bool(runtime.main_cores),
        "stall_share": statistics.median(got.stats.stall_s / got.stats.latency_s for _, got in pairs),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers_version},
    }


def _exit_head(
    options: argparse.Namespace, ordinary: OrdinaryDecoding, prompts: list[list[int]]
) -> str | RehearsedHead:
    if options.match_rate is None:
        return "shared"
    texts = [ordinary.generate(p, max_new_tokens=options.tokens, ignore_eos=True) for p in prompts]
    known = tuple((*text.prompt_ids, *text.token_ids) for text in texts)
    return RehearsedHead(known, options.match_rate, ordinary.info.vocab_size)


def main() -> None:
    """Measure and print, or write, the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--exit-layer", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="ordinary and pipelined decoding in compiled code")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--rounds", type=int, default=7, help="paired runs of every prompt")
    parser.add_argument("--match-rate", type=float, help="an exit head that is right with this probability")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures = json.dumps(measure(options), indent=2)
    print(figures)
    if options.json:
        options.json.write_text(figures + "\n")


if __name__ == "__main__":
    main()
