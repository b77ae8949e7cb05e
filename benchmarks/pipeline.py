"""Ordinary decoding, pipelined decoding and transformers' `generate` on the same prompts, in turn, in one run.

    python -m benchmarks.pipeline --k 1 --rounds 7 --json figures.json
    python -m benchmarks.pipeline --model random:512x12 --match-rate 0.7 --launcher processes
    python -m benchmarks.pipeline --k 7 --emulate-layer-ms 3

Every process stays on a core of its own where there are enough; ordinary decoding and transformers run on the main
process' core. Times are for a token after the first; the first round is dropped. With --emulate-layer-ms every stage
computes its real result and then sleeps until that time per layer has passed, in ordinary decoding too: protocol and
scheduling are real, the devices are not. The cores are kept awake meanwhile, as a real device's host is.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.keep_cores_awake import keep_cores_awake
from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, ledger_table, markdown, mean_ledger_ms, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.config import SHARED
from ppd_runtime.cost_model.theory import latency_ratio, realised_saving
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.results import GenerationResult
from ppd_runtime.tune.comparison.in_turn import on_core_of
from ppd_runtime.tune.quartiles import quartiles

PROMPTS = (
    "def read_lines(path):",
    "class Reader:",
    "    def __init__(self, name, value=None):",
)
Pair = tuple[GenerationResult, GenerationResult]
"""Ordinary decoding's and the pipeline's result for one prompt."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    torch.set_num_threads(1)  # transformers' too: a second thread would share the one core
    device, real_time, awake = None, False, False
    with contextlib.ExitStack() as stack:
        if options.emulate_layer_ms is not None:
            device = EmulatedDevice(options.emulate_layer_ms, options.emulate_head_ms)
            real_time, awake = stack.enter_context(woken_at_once()), stack.enter_context(keep_cores_awake())
        model = stack.enter_context(model_folder(options.model))
        ordinary = OrdinaryDecoding(model, dtype=options.dtype, compile=options.compile, emulate=device)
        prompts = [ordinary.tokenizer.encode(prompt) for prompt in PROMPTS]
        runtime = PPDRuntime(
            model,
            k=options.k,
            workers=options.workers,
            exit_layer=options.exit_layer,
            dtype=options.dtype,
            launcher=options.launcher,
            compile=options.compile,
            exit_head=exit_head(options, ordinary, prompts),
            emulate=device,
            run_ahead=not options.no_run_ahead,
        )
        stack.enter_context(runtime)
        library = None if device else _library_model(ordinary)
        pairs, library_times = _paired_runs(options, ordinary, runtime, prompts, library)
        return _figures(options, runtime, pairs, library_times) | {"real_time": real_time, "awake": awake}


@contextlib.contextmanager
def woken_at_once() -> Iterator[bool]:
    """Real-time scheduling for this thread and whatever it starts; whether it was granted.

    An emulated device sleeps most of the time: a device that wakes should not queue behind programs that only compute.
    """
    try:
        before, priority = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, priority)


def transformers_time_per_token(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> float:
    """Seconds for a token after the first: the difference of a long and a one-token `generate`."""
    inputs = torch.tensor([prompt], device=model.device)

    def spent(tokens: int) -> float:
        began = time.perf_counter()
        model.generate(inputs, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0)
        return time.perf_counter() - began

    return (spent(num_tokens) - spent(1)) / (num_tokens - 1)


def table(figures: Figures) -> str:
    """The figures in Markdown, as an emulation's where they are."""
    emulated = figures["emulated_layer_ms"]
    columns = ["model", "k", "workers", "ordinary, ms a token", "transformers `generate`", "PPD", "ratio", "quartiles"]
    columns += ["Theorem 4.1", "realised saving", "match rate", "tokens identical", "pairs"]
    row = [
        figures["model"]
        + (", compiled" if figures["compiled"] else "")
        + (f", EMULATED devices of {emulated:g} ms a layer" if emulated is not None else ""),
        figures["k"],
        figures["workers"],
        *(figures[name] for name in ("autoregressive_ms", "transformers_ms", "ppd_ms", "ratio")),
        f"{figures['ratio_quartiles'][0]:.3f} to {figures['ratio_quartiles'][2]:.3f}",
        *(figures[name] for name in ("predicted_ratio", "realised_saving", "match_rate", "identical_tokens", "pairs")),
    ]
    return f"{markdown(columns, [row])}\n\n{ledger_table(figures['ledger_ms'], emulated is not None)}"


def _paired_runs(
    options: argparse.Namespace,
    ordinary: OrdinaryDecoding,
    runtime: PPDRuntime,
    prompts: list[list[int]],
    library: PreTrainedModel | None,
) -> tuple[list[Pair], list[float]]:
    pairs, library_times = [], []
    for turn in range(options.rounds + 1):
        for prompt in prompts:
            with on_core_of(runtime):
                expected = ordinary.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                if library:
                    library_times += [transformers_time_per_token(library, prompt, options.tokens)] if turn else []
            got = runtime.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
            pairs += [(expected, got)] if turn else []
    return pairs, library_times


def _figures(
    options: argparse.Namespace, runtime: PPDRuntime, pairs: list[Pair], library_times: list[float]
) -> Figures:
    hits, misses = (sum(getattr(got.stats, name) for _, got in pairs) for name in ("hits", "misses"))
    asked = sum(got.stats.asked for _, got in pairs)
    rate = sum(got.stats.foreseen for _, got in pairs) / asked if asked else hits / max(hits + misses, 1)
    whole = latency_ratio(runtime.info.num_layers, runtime.exit_layer, rate, options.tokens)
    predicted = (whole * options.tokens - 1) / (options.tokens - 1)  # of tokens after the first
    ratios = [got.stats.time_per_token_s / expected.stats.time_per_token_s for expected, got in pairs]
    return {
        "model": options.model,
        "launcher": options.launcher,
        "emulated_layer_ms": options.emulate_layer_ms,
        "autoregressive_ms": statistics.median(expected.stats.time_per_token_s for expected, _ in pairs) * 1000,
        "ppd_ms": statistics.median(got.stats.time_per_token_s for _, got in pairs) * 1000,
        "transformers_ms": statistics.median(library_times) * 1000 if library_times else None,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "predicted_ratio": predicted,
        "realised_saving": realised_saving(statistics.median(ratios), predicted) if predicted < 1 else None,
        "match_rate": hits / (hits + misses),
        "identical": all(expected.token_ids == got.token_ids for expected, got in pairs),
        "identical_tokens": _identical_tokens(pairs),
        "pairs": len(pairs),
        "k": options.k,
        "workers": runtime.config.num_subs,
        "exit_layer": runtime.exit_layer,
        "compiled": options.compile,
        "run_ahead": not options.no_run_ahead,
        "pinned": bool(runtime.main_cores),
        "ledger_ms": {
            way: mean_ledger_ms([pair[place].stats.ledger_per_token for pair in pairs])
            for place, way in enumerate(("ordinary", "PPD"))
        },
        "stall_share": statistics.median(got.stats.stall_s / got.stats.latency_s for _, got in pairs),
    }


def _identical_tokens(pairs: list[Pair]) -> float:
    """Share of the tokens that are ordinary decoding's at the same place."""
    places = [a == b for expected, got in pairs for a, b in zip(expected.token_ids, got.token_ids, strict=True)]
    return sum(places) / len(places)


def _library_model(ordinary: OrdinaryDecoding) -> PreTrainedModel:
    dtype = ordinary.stage.model.dtype
    model = AutoModelForCausalLM.from_pretrained(ordinary.info.folder, dtype=dtype).eval().to(ordinary.stage.device)
    torch.set_num_threads(ordinary.config.threads_per_worker)
    return model


def exit_head(options: argparse.Namespace, ordinary: OrdinaryDecoding, prompts: list[list[int]]) -> str | OracleHead:
    """The model's own head, or one that is right about these prompts' texts with the set probability."""
    if options.match_rate is None:
        return SHARED
    if not 0 <= options.match_rate <= 1:
        raise ValueError(f"--match-rate {options.match_rate}: give a share from 0 to 1")
    texts = [ordinary.generate(p, max_new_tokens=options.tokens, ignore_eos=True) for p in prompts]
    known = tuple((*text.prompt_ids, *text.token_ids) for text in texts)
    return OracleHead(known, options.match_rate, ordinary.info.vocab_size)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--k", type=positive, default=1)
    options.add_argument("--workers", type=positive, help="sub-processes; fewer than k run candidates as one pass")
    options.add_argument("--exit-layer", type=positive)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--tokens", type=positive, default=128, help="new tokens for each prompt")
    options.add_argument("--rounds", type=positive, default=7, help="paired runs of every prompt")
    options.add_argument("--match-rate", type=float, help="an exit head that is right with this probability")
    options.add_argument("--compile", action="store_true", help="ordinary and pipelined decoding in compiled code")
    options.add_argument("--no-run-ahead", action="store_true", help="a lone sub-process waits for exit states")
    options.add_argument("--launcher", choices=("ray", "processes"), default="processes")
    options.add_argument("--emulate-layer-ms", type=float, help="devices that take so long for a layer")
    options.add_argument("--emulate-head-ms", type=float, default=0.0, help="and for a head")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
