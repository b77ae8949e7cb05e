"""`ppd plan`: which layout is the fastest here, measured, or on devices that are not here, by the formulas."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.checks import check_number
from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.config import SHARED, in_process_config
from ppd_runtime.sampling_params import SamplingParams
from ppd_runtime.tune.device_plan import DevicePlan, Given, plan_devices
from ppd_runtime.tune.tables import plain_table

if TYPE_CHECKING:
    from ppd_runtime.tune.layouts import LayoutFigures
    from ppd_runtime.tune.plan import Plan
    from ppd_runtime.tune.subject import Subject

_MOST_ROWS = 16


@takes(
    elsewhere=options.group(Given),
    sampling=options.sampling(*options.USUAL_SAMPLING, max_new_tokens=64),
    place=options.COMPILED,
)
def plan(
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    seconds: Annotated[float, typer.Option(help="Run each layout so long, in turn with ordinary decoding.")] = 8.0,
    exit_head: options.ExitHead = SHARED,
    *,
    elsewhere: Settings,
    sampling: Settings,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
    place: Settings,
) -> None:
    """Run each layout that fits this machine on real text, rank them by speed, and advise one or none.

    Layouts are ordinary decoding with twice the threads, the paper's with k=1 and k=3, and stages, as far as there is a
    CPU core or a GPU for each process. Each runs in turn with ordinary decoding. Prompts are user's messages where the
    model has a chat template.

    With --devices no layout runs: formulas predict its time from those of a layer, a head and a message, and from match
    rates. What is not given of these is measured here, but for --hop-ms.
    """
    with one_line_errors(plan):
        check_outputs(out)
        check_number("seconds", seconds)
        given = Given(**elsewhere)
        in_process_config("a plan", {"model": model, **place})
        load = partial(_loaded, model, prompts, limit, SamplingParams(**sampling), place)
        if given.devices is None:
            planned = _here(load(), seconds, exit_head)
        else:
            planned = _elsewhere(given, model, exit_head, place.get("weights"), load)
        give_json(planned.as_dict(), as_json, out)
        if not as_json:
            _print(planned)


def _here(subject: "Subject", seconds: float, exit_head: str) -> "Plan | DevicePlan":
    from ppd_runtime.tune.plan import plan_here

    return plan_here(subject, seconds, exit_head, show_progress)


def _elsewhere(
    given: Given, model: str, exit_head: str, weights: str | None, load: "Callable[[], Subject]"
) -> "Plan | DevicePlan":
    """The formulas' plan; the model is loaded where something is left to measure."""
    if exit_head != SHARED:
        told = f"--exit-head {exit_head} with --devices: `ppd match-rate --exit-head` measures its rates"
        raise ValueError(f"{told}, give them as --match-rates instead")
    given.check_weights(weights)
    return plan_devices(given, model, load() if given.measures else None, show_progress)


def _loaded(model: str, prompts: str, limit: int | None, params: SamplingParams, place: Settings) -> "Subject":
    from ppd_runtime.tune.subject import loaded

    return loaded(model, prompts, limit, params, **place)


def _print(planned: "Plan | DevicePlan") -> None:
    print(planned.title, end="\n\n")
    if isinstance(planned, DevicePlan):
        _print_predicted(planned)
    else:
        print_layouts(planned.layouts)
    print("", *planned.cautions, planned.verdict.text, sep="\n")


def print_layouts(rows: "Sequence[LayoutFigures]") -> None:
    """What was measured, as a table; ordinary decoding comes first."""
    if not rows:
        return
    ordinary = sorted(row.ordinary_ms_per_token for row in rows)[len(rows) // 2]
    cells = [["ordinary decoding", f"{ordinary:.3f}", "1.00", "", "", ""]]
    for row in rows:
        allowed, saving = row.allowed_speedup, row.realised_saving
        cells.append(
            [
                row.layout.name,
                f"{row.ms_per_token:.3f}",
                f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})",
                "" if allowed is None else f"{allowed:.2f}",
                "" if saving is None else "none" if saving <= 0 else f"{saving:.0%}",
                "yes" if row.identical else "NO",
            ]
        )
    print(plain_table(["", "ms/token", "speed-up", "allowed", "realised", "equal"], cells))


def _print_predicted(planned: "DevicePlan") -> None:
    cells = [["ordinary decoding", "1", f"{planned.ordinary_ms:.3f}", "1.00", "", "1.00"]]
    for row in planned.predicted[:_MOST_ROWS]:
        figures = [f"{row.ms_per_token:.3f}", f"{row.speedup:.2f}", f"{row.allowed_speedup:.2f}"]
        cells.append([row.name, str(row.devices), *figures, f"{row.compute_per_token:.2f}"])
    print(plain_table(["", "devices", "ms/token", "speed-up", "allowed", "compute"], cells))
