"""The planner's predictions beside the runtime's times, for several exit layers and stages of one model, in one run.

    python -m benchmarks.planner --exit-layers 6,7,8,9,10,11 --k 1 --rounds 5 --json figures.json
    python -m benchmarks.planner --stages 2 --k 1,3 --tokens 64 --rounds 7
    python -m benchmarks.planner --stages 2 --k 3 --rows 4 --compile --tokens 64 --rounds 7

Each round calibrates again, then decodes every prompt with every setting, in turn, so that a machine that changes
changes both alike. Predictions take match rates measured on the same prompts beforehand, not those of the timed runs;
times are for a token after the first, medians over rounds and prompts. Settings need a core for each worker. Stages run
without repetitions, which the planner does not know.
"""

import argparse
import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.pipeline import PROMPTS
from benchmarks.recording import Figures, markdown, new_parser, positive, run, whole_numbers
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.calibration.calibrate import Calibrator
from ppd_runtime.calibration.plan_inputs import Measurement
from ppd_runtime.calibration.staged_plans import rank_stages
from ppd_runtime.calibration.stages_at_work import with_stages_at_work
from ppd_runtime.checks import even_cuts
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import ordinary_ms, plan
from ppd_runtime.cost_model.tradeoff import MatchRates
from ppd_runtime.measure.against_ordinary import on_core_of
from ppd_runtime.measure.quartiles import quartiles
from ppd_runtime.results import GenerationResult
from ppd_runtime.sampling_params import SamplingParams

ORDINARY = "ordinary"


@dataclass(frozen=True)
class Setting:
    """A way to decode, and what the planner says of it."""

    label: str
    layout: Mapping[str, Any]
    """The runtime's settings; none: ordinary decoding."""
    predicted_ms: Callable[[Calibration], float]
    match_rate: float | None = None
    """Measured beforehand; of stages, the share of tokens that some boundary names."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    measurement = Measurement(options.model, PROMPTS, sampling=sampling, compile=options.compile)
    rates = measurement.match_rates(options.ks, most_stages=max(options.stages, default=1))
    settings = _settings(options, measurement.num_layers, rates)
    ordinary = Setting(ORDINARY, {}, partial(ordinary_ms, measurement.num_layers))
    results: defaultdict[str, list[GenerationResult]] = defaultdict(list)
    calibrations: list[Calibration] = []
    devices = max(1 + max(options.ks), max(options.stages, default=0))
    conditions = measurement.conditions(devices, max(options.ks))
    with contextlib.ExitStack() as stack:
        runtimes = {
            setting.label: stack.enter_context(
                PPDRuntime(options.model, launcher="processes", compile=options.compile, **setting.layout)
            )
            for setting in settings
        }
        calibrator = stack.enter_context(Calibrator(measurement.ordinary, conditions))
        for turn in range(options.rounds + 1):
            if turn:
                times = calibrator.measure()
                calibrations.append(with_stages_at_work(times, measurement.ordinary, conditions, options.stages))
            for prompt in measurement.prompts:
                got = {label: _behind_another(runtime, prompt, sampling) for label, runtime in runtimes.items()}
                with on_core_of(next(iter(runtimes.values()))):
                    got[ORDINARY] = _behind_another(measurement.ordinary, prompt, sampling)
                for label, result in got.items():
                    if result.token_ids != got[ORDINARY].token_ids:
                        raise RuntimeError(f"{label}: other tokens than ordinary decoding's")
                    results[label] += [result] if turn else []
    return {
        "rows": [_row(setting, ordinary, calibrations, results) for setting in (*settings, ordinary)],
        "rounds": options.rounds,
        "prompts": len(measurement.prompts),
        "tokens": options.tokens,
        "pinned": all(runtime.main_cores for runtime in runtimes.values()),
        "calibrations": [asdict(calibration) for calibration in calibrations],
    }


def _behind_another(
    generator: PPDRuntime | OrdinaryDecoding, prompt: list[int], sampling: SamplingParams
) -> GenerationResult:
    """A text behind the same one, as in a service: cores that rested or ran another program are slower."""
    generator.generate(prompt, sampling)
    return generator.generate(prompt, sampling)


def _settings(options: argparse.Namespace, num_layers: int, rates: MatchRates) -> list[Setting]:
    """Every exit layer and every number of stages with every k."""

    def of_paper(layer: int, k: int) -> Setting:
        rate = rates.rates[layer, k]

        def planned(times: Calibration) -> float:
            return plan(num_layers, layer, k, rate, times).ms_per_token

        return Setting(f"{layer}, k={k}", {"exit_layer": layer, "k": k}, planned, rate)

    def of_stages(size: int, k: int) -> Setting:
        cuts = even_cuts(num_layers, size)
        by_k = {(cuts, other): rates.first_boundary[cuts, other] for other in options.ks}

        def planned(times: Calibration) -> float:
            ranked = rank_stages(num_layers, times, by_k, size, [options.rows])
            return next(row.ms_per_token for row in ranked if row.k == k)

        layout = {"stages": size, "cuts": cuts, "k": k, "rows": options.rows, "repetitions": False}
        return Setting(f"{size} stages, k={k}", layout, planned, 1 - by_k[cuts, k][-1])

    layers = options.exit_layers or ([] if options.stages else range(6, 12))
    ways = itertools.chain(((of_paper, layer) for layer in layers), ((of_stages, size) for size in options.stages))
    return [way(number, k) for way, number in ways for k in options.ks]


def _row(
    setting: Setting,
    ordinary: Setting,
    calibrations: Sequence[Calibration],
    results: Mapping[str, Sequence[GenerationResult]],
) -> Figures:
    """Times are medians; speed-ups too, of each text's time beside ordinary decoding's and of each calibration's."""
    times, ordinarys = (
        [1000 * result.stats.time_per_token_s for result in results[label]] for label in (setting.label, ORDINARY)
    )
    predictions = list(map(setting.predicted_ms, calibrations))
    predicted_speedups = [ordinary.predicted_ms(of) / ms for of, ms in zip(calibrations, predictions, strict=True)]
    prediction, measured = statistics.median(predictions), statistics.median(times)
    rates = [result.stats.match_rate for result in results[setting.label]]
    return {
        "setting": setting.label,
        "match_rate": setting.match_rate,
        "match_rate_in_time": statistics.fmean(rate or 0.0 for rate in rates) if setting.layout else None,
        "predicted_ms": prediction,
        "measured_ms": measured,
        "error": prediction / measured - 1,
        "measured_quartiles_ms": quartiles(times),
        "predicted_speedup": statistics.median(predicted_speedups),
        "measured_speedup": statistics.median(its / ms for its, ms in zip(ordinarys, times, strict=True)),
    }


def table(figures: Figures) -> str:
    """The rows in Markdown."""
    columns = ["exit layer or stages, k", "match rate, measured", "hits in the timed runs"]
    columns += ["predicted, ms a token", "measured", "error", "predicted speed-up", "measured"]
    names = ("setting", "match_rate", "match_rate_in_time", "predicted_ms", "measured_ms")
    speedups = ("predicted_speedup", "measured_speedup")
    rows = [[*map(row.get, names), f"{row['error']:+.1%}", *map(row.get, speedups)] for row in figures["rows"]]
    return markdown(columns, rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument(
        "--exit-layers", type=whole_numbers, help="with commas; default: 6 to 11, or none with --stages"
    )
    options.add_argument("--stages", type=whole_numbers, default=[], help="numbers of even stages, with commas")
    options.add_argument("--k", dest="ks", type=whole_numbers, default=[1], help="numbers of candidates, with commas")
    options.add_argument("--rows", type=positive, default=1, help="of a stage's pass")
    options.add_argument("--compile", action="store_true", help="compiled passes, in ordinary decoding too")
    options.add_argument("--tokens", type=positive, default=128, help="new tokens for each prompt")
    options.add_argument("--rounds", type=positive, default=5)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
