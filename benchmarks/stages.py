"""The staged layout beside ordinary decoding, in turn, on texts that the demo model has not seen.

    python -m benchmarks.stages --stages 4 --k 3 --rows 8 --emulate-layer-ms 3 --compile --launcher processes
    python -m benchmarks.stages --stages 2 --k 3 --compile --launcher processes

Times are for a token after the first; the first round is dropped, and serves the heads' calibration. "Lock-step" is the
same machines over the same texts on virtual clocks, with hops and heads of no time: the best that they could reach.
With --emulate-layer-ms every stage computes its real result and then sleeps until that time per layer has passed, as a
device would take it for all rows of a pass.
"""

import argparse
import contextlib
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.keep_cores_awake import keep_cores_awake
from benchmarks.pipeline import woken_at_once
from benchmarks.recording import Figures, markdown, mean_ledger_ms, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.calibration.simulated_stages import SimulatedStages, StageTimes
from ppd_runtime.cost_model.staged import speedup_bound
from ppd_runtime.measure.against_ordinary import on_core_of
from ppd_runtime.measure.prompt_files import read_prompts
from ppd_runtime.measure.quartiles import quartiles
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.results import GenerationResult

Pair = tuple[GenerationResult, GenerationResult]
"""Ordinary decoding's and the stages' result for one prompt."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: times are for tokens after the first, give at least 2")
    prompts = [prompt.text for prompt in read_prompts(options.prompts, options.limit)]
    params = SamplingParams(options.tokens, options.temperature, seed=1, ignore_eos=True)
    device = None
    with contextlib.ExitStack() as stack:
        if options.emulate_layer_ms is not None:
            device = EmulatedDevice(options.emulate_layer_ms, row_cost=options.row_cost)
            stack.enter_context(woken_at_once())
            stack.enter_context(keep_cores_awake())
        place = {"dtype": options.dtype, "compile": options.compile, "emulate": device}
        ordinary = OrdinaryDecoding(options.model, **place)
        runtime = PPDRuntime(
            options.model,
            stages=options.stages,
            cuts=options.cuts,
            k=options.k,
            rows=options.rows,
            repetitions=not options.no_repetitions,
            launcher=options.launcher,
            **place,
        )
        stack.enter_context(runtime)
        pairs = _paired_runs(options.rounds, ordinary, runtime, prompts, params)
    allowed = _lock_step_speedup(options, runtime, prompts, params)
    figures = _figures(options, runtime, pairs)
    saved, to_save = (1 - 1 / speedup for speedup in (figures["speedup"], allowed))
    return figures | {"lock_step_speedup": allowed, "realised_saving": saved / to_save}


def table(figures: Figures) -> str:
    """The figures in Markdown, as an emulation's where they are."""
    emulated = figures["emulated_layer_ms"]
    columns = ["layout", "ordinary, ms a token", "stages", "speed-up", "quartiles", "lock-step", "N/E[J]"]
    columns += ["realised saving", "tokens first named at boundary 1, 2, …, never", "tokens identical", "texts"]
    layout = f"{figures['stages']} stages, k={figures['k']}, rows={figures['rows']}, T={figures['temperature']:g}"
    layout += "" if figures["repetitions"] else ", without repetitions"
    conditions = f", EMULATED devices of {emulated:g} ms a layer" if emulated is not None else ""
    row = [
        layout + ", compiled" * figures["compiled"] + conditions,
        *(figures[name] for name in ("autoregressive_ms", "staged_ms", "speedup")),
        f"{figures['speedup_quartiles'][0]:.2f} to {figures['speedup_quartiles'][2]:.2f}",
        *(figures[name] for name in ("lock_step_speedup", "bound", "realised_saving")),
        ", ".join(map(str, figures["first_boundary"])),
        figures["identical_tokens"],
        figures["texts"],
    ]
    return markdown(columns, [row])


def _paired_runs(
    rounds: int, ordinary: OrdinaryDecoding, runtime: PPDRuntime, prompts: Sequence[str], params: SamplingParams
) -> list[Pair]:
    pairs: list[Pair] = []
    for turn in range(rounds + 1):
        for prompt in prompts:
            with on_core_of(runtime):
                expected = ordinary.generate(prompt, params)
            got = runtime.generate(prompt, params)
            pairs += [(expected, got)] if turn else []
    return pairs


def _figures(options: argparse.Namespace, runtime: PPDRuntime, pairs: list[Pair]) -> Figures:
    ratios = [expected.stats.time_per_token_s / got.stats.time_per_token_s for expected, got in pairs]
    first = np.sum([got.stats.first_boundary for _, got in pairs], axis=0)
    same = [ours == theirs for a, b in pairs for ours, theirs in zip(a.token_ids, b.token_ids, strict=False)]
    return {
        "model": options.model,
        "stages": runtime.config.stages,
        "cuts": options.cuts,
        "k": options.k,
        "rows": options.rows,
        "repetitions": not options.no_repetitions,
        "temperature": options.temperature,
        "launcher": runtime.launcher,
        "compiled": options.compile,
        "emulated_layer_ms": options.emulate_layer_ms,
        "row_cost": options.row_cost,
        "autoregressive_ms": statistics.median(a.stats.time_per_token_s for a, _ in pairs) * 1000,
        "staged_ms": statistics.median(b.stats.time_per_token_s for _, b in pairs) * 1000,
        "speedup": statistics.median(ratios),
        "speedup_quartiles": quartiles(ratios),
        "first_boundary": first.tolist(),
        "bound": speedup_bound((first / first.sum()).tolist()),
        "identical": all(a.token_ids == b.token_ids for a, b in pairs),
        "identical_tokens": "all" if all(same) else f"{np.mean(same):.4f}",
        "texts": len(pairs),
        "ledger_ms": mean_ledger_ms([b.stats.ledger_per_token for _, b in pairs]),
    }


def _lock_step_speedup(
    options: argparse.Namespace, runtime: PPDRuntime, prompts: Sequence[str], params: SamplingParams
) -> float:
    """What the machines could reach over these texts."""
    simulated = SimulatedStages(
        runtime.info, runtime.cuts, options.k, options.rows, options.compile, not options.no_repetitions
    )
    times = StageTimes(row_cost=options.row_cost)
    prompt_ids = [runtime.tokenizer.encode(prompt) for prompt in prompts]
    for ids in prompt_ids:  # for the heads' calibration, as in the round that is dropped
        simulated.decode(ids, params, times)
    taken = [simulated.decode(ids, params, times).time_per_token for ids in prompt_ids]
    return runtime.info.num_layers / statistics.median(taken)


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = new_parser(__doc__)
    found.add_argument("--model", default="demo")
    found.add_argument("--prompts", default="demo", help="JSON Lines, or demo")
    found.add_argument("--limit", type=positive, default=6, help="prompts")
    found.add_argument("--stages", type=positive)
    found.add_argument("--cuts")
    found.add_argument("--k", type=positive, default=3)
    found.add_argument("--rows", type=positive, default=1)
    found.add_argument("--row-cost", type=float, default=0.0, help="of a further row on an emulated device, as a share")
    found.add_argument("--no-repetitions", action="store_true", help="without boundary 0")
    found.add_argument("--temperature", type=float, default=0.0)
    found.add_argument("--tokens", type=positive, default=64)
    found.add_argument("--rounds", type=positive, default=3)
    found.add_argument("--dtype", default="float32")
    found.add_argument("--launcher", default="processes")
    found.add_argument("--compile", action="store_true")
    found.add_argument("--emulate-layer-ms", type=float)
    return found


if __name__ == "__main__":
    run(parser(), measure, table)
