"""The planner's predictions beside the runtime's times, for several exit layers of one model, in one run.

    python -m benchmarks.planner --exit-layers 6,7,8,9,10,11 --k 1 --rounds 5 --json figures.json

Each round calibrates again, then decodes every prompt with every setting, in turn, so that a machine that changes
changes both alike. Predictions take match rates measured on the same prompts beforehand, not those of the timed runs;
times are for a token after the first, medians over rounds and prompts. Settings need a core for each worker.
"""

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.pipeline import PROMPTS
from benchmarks.recording import Figures, markdown, new_parser, positive, run, whole_numbers
from ppd_runtime import PPDRuntime
from ppd_runtime.calibration.calibrate import Calibrator
from ppd_runtime.calibration.plan_inputs import Measurement
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import ordinary_ms, plan
from ppd_runtime.cost_model.tradeoff import Rates
from ppd_runtime.measure.against_ordinary import on_core_of
from ppd_runtime.measure.quartiles import quartiles
from ppd_runtime.sampling_params import SamplingParams

ORDINARY = "ordinary"
Setting = tuple[int, int]
"""Exit layer and k."""


def measure(options: argparse.Namespace) -> Figures:
    """Run everything; the figures by name."""
    settings = [(layer, k) for layer in options.exit_layers for k in options.ks]
    sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
    measurement = Measurement(options.model, PROMPTS, sampling=sampling)
    rates = measurement.match_rates(options.ks).rates
    times: defaultdict[Setting | str, list[float]] = defaultdict(list)
    realised: defaultdict[Setting | str, list[float]] = defaultdict(list)
    calibrations: list[Calibration] = []
    conditions = measurement.conditions(1 + max(options.ks), max(options.ks))
    with contextlib.ExitStack() as stack:
        runtimes = {
            (layer, k): stack.enter_context(PPDRuntime(options.model, exit_layer=layer, k=k, launcher="processes"))
            for layer, k in settings
        }
        calibrator = stack.enter_context(Calibrator(measurement.ordinary, conditions))
        for turn in range(options.rounds + 1):
            calibrations += [calibrator.measure()] if turn else []
            for prompt in measurement.prompts:
                for setting, runtime in runtimes.items():
                    result = runtime.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                    if turn:
                        times[setting].append(result.stats.time_per_token_s * 1000)
                        realised[setting].append(result.stats.match_rate or 0.0)
                with on_core_of(runtime):
                    expected = measurement.ordinary.generate(prompt, max_new_tokens=options.tokens, ignore_eos=True)
                times[ORDINARY] += [expected.stats.time_per_token_s * 1000] if turn else []
                if expected.token_ids != result.token_ids:
                    raise RuntimeError(f"{setting}: other tokens than ordinary decoding's")
    return {
        "rows": _rows(measurement.num_layers, settings, calibrations, rates, times, realised),
        "rounds": options.rounds,
        "prompts": len(measurement.prompts),
        "tokens": options.tokens,
        "pinned": bool(runtime.main_cores),
        "calibrations": [asdict(calibration) for calibration in calibrations],
    }


def _rows(
    num_layers: int,
    settings: Sequence[Setting],
    calibrations: Sequence[Calibration],
    rates: Rates,
    times: Mapping[Setting | str, list[float]],
    realised: Mapping[Setting | str, list[float]],
) -> list[dict[str, object]]:
    rows = []
    for setting in (*settings, ORDINARY):
        if isinstance(setting, str):
            predicted = [ordinary_ms(num_layers, calibration) for calibration in calibrations]
            known: dict[str, object] = {"setting": setting}
        else:
            layer, k = setting
            predicted = [
                plan(num_layers, layer, k, rates[setting], calibration).ms_per_token for calibration in calibrations
            ]
            known = {"setting": f"{layer}, k={k}", "match_rate": rates[setting]}
            known["match_rate_in_time"] = statistics.fmean(realised[setting])
        prediction, measured = statistics.median(predicted), statistics.median(times[setting])
        figures = {"predicted_ms": prediction, "measured_ms": measured, "error": prediction / measured - 1}
        rows.append(known | figures | {"measured_quartiles_ms": quartiles(times[setting])})
    return rows


def table(figures: Figures) -> str:
    """The rows in Markdown."""
    columns = ["exit layer, k", "match rate, measured", "hits in the timed runs"]
    columns += ["predicted, ms a token", "measured", "error"]
    names = ("setting", "match_rate", "match_rate_in_time", "predicted_ms", "measured_ms")
    rows = [[*(row.get(name) for name in names), f"{row['error']:+.1%}"] for row in figures["rows"]]
    return markdown(columns, rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo")
    options.add_argument("--exit-layers", type=whole_numbers, default=[6, 7, 8, 9, 10, 11], help="with commas")
    options.add_argument("--k", dest="ks", type=whole_numbers, default=[1], help="numbers of candidates, with commas")
    options.add_argument("--tokens", type=positive, default=128, help="new tokens for each prompt")
    options.add_argument("--rounds", type=positive, default=5)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
