"""`ppd plan`: which layout is the fastest here, measured, or on devices that are not here, by the formulas."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_runtime.checks import check_number
from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_image, check_outputs, give_json
from ppd_runtime.config import in_process_config
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ppd_runtime.tune.device_plan import DevicePlan
    from ppd_runtime.tune.layouts import LayoutFigures
    from ppd_runtime.tune.plan import Plan
    from ppd_runtime.tune.subject import Subject

_MOST_ROWS = 16


@dataclass(frozen=True)
class Elsewhere:
    """What is known of devices that are not here."""

    devices: int | None = None
    """Predict for so many devices that are not here, by formulas, instead of running layouts."""
    hop_ms: float | None = None
    """With --devices: time of a message between two of them."""
    layer_ms: float | None = None
    """With --devices: time of a layer; default: measured here, and the heads' with it."""
    head_ms: float | None = None
    """With --devices: time of the final head."""
    exit_head_ms: float | None = None
    """With --devices: time of an exit head."""
    match_rates: Path | None = None
    """With --devices: what `ppd match-rate --out` wrote, instead of measuring rates."""
    layers: int | None = None
    """With --devices: decoder layers, where the match rates' file lacks them."""
    k: str | None = None
    """With --devices: candidates to plan with, such as 1,3; default: all that the file has, or 1,3,5."""
    row_cost: float | None = None
    """With --devices: what a further token adds to a pass, as a share of the first one's time; default: measured
    where the layers are, else 0."""
    all_reduce_ms: float | None = None
    """With --devices: rank tensor parallelism with all-reduces of this time, two for each layer."""

    def check(self) -> None:
        """Raise ValueError for something that is known of no devices."""
        for entry in fields(self):
            if self.devices is None and (value := getattr(self, entry.name)) is not None:
                raise ValueError(f"{entry.name}={value}: is for devices that are not here, give --devices as well")


@takes(
    elsewhere=options.group(Elsewhere, make=Elsewhere),
    sampling=options.sampling(*options.USUAL_SAMPLING, max_new_tokens=64),
    place=options.COMPILED,
)
def plan(
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    seconds: Annotated[float, typer.Option(help="Run each layout so long, in turn with ordinary decoding.")] = 8.0,
    *,
    elsewhere: Elsewhere,
    sampling: Settings,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a bar chart of the speed-ups into this image.")] = None,
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
        check_outputs(out, plot)
        check_image(plot)
        check_number("seconds", seconds)
        elsewhere.check()
        in_process_config("a plan", {"model": model, **place})
        load = partial(_loaded, model, prompts, limit, SamplingParams(**sampling), place)
        if elsewhere.devices is None:
            planned = _here(load(), seconds)
        else:
            planned = _elsewhere(elsewhere, model, place.get("weights"), load)
        _draw(planned, plot)
        give_json(planned.as_dict(), as_json, out)
        if not as_json:
            _print(planned)


def _here(subject: "Subject", seconds: float) -> "Plan | DevicePlan":
    from ppd_runtime.tune.plan import plan_here

    return plan_here(subject, seconds, show_progress)


def _elsewhere(
    elsewhere: Elsewhere, model: str, weights: str | None, load: "Callable[[], Subject]"
) -> "Plan | DevicePlan":
    """The formulas' plan; the model is loaded where something is left to measure."""
    from ppd_runtime.cost_model.tradeoff import parse_list
    from ppd_runtime.tune.device_plan import Given, plan_devices

    known: dict[str, Any] = asdict(elsewhere)
    k = known.pop("k")
    given = Given(**known, ks=None if k is None else parse_list("--k", k, int), weights=weights)
    return plan_devices(given, model, load() if given.measures else None, show_progress)


def _loaded(model: str, prompts: str, limit: int | None, params: SamplingParams, place: Settings) -> "Subject":
    from ppd_runtime.tune.subject import loaded

    return loaded(model, prompts, limit, params, **place)


def _draw(planned: "Plan | DevicePlan", plot: Path | None) -> None:
    if plot is None:
        return
    from ppd_runtime.tune.comparison.chart import Bar, draw_speedups

    draw_speedups({name: Bar(*figures) for name, figures in planned.bars().items()}, planned.title, plot)


def _print(planned: "Plan | DevicePlan") -> None:
    from rich.console import Console

    from ppd_runtime.tune.device_plan import DevicePlan

    console = Console()
    console.print(planned.title, highlight=False, markup=False)
    if isinstance(planned, DevicePlan):
        _print_predicted(planned)
    else:
        print_layouts(planned.layouts)
    for line in (*planned.cautions, planned.verdict.text):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_layouts(rows: "Sequence[LayoutFigures]") -> None:
    """What was measured, as a table; ordinary decoding comes first."""
    if not rows:
        return
    ordinary = sorted(row.ordinary_ms_per_token for row in rows)[len(rows) // 2]
    cells = [["ordinary decoding", "1", f"{ordinary:.3f}", "1.00", "", "", "", ""]]
    for row in rows:
        allowed, saving = row.allowed_speedup, row.realised_saving
        cells.append(
            [
                row.layout.name,
                str(row.layout.processes),
                f"{row.ms_per_token:.3f}",
                f"{row.speedup:.2f}",
                f"{row.speedup_low:.2f} to {row.speedup_high:.2f}",
                "" if allowed is None else f"{allowed:.2f}",
                "" if saving is None else "none" if saving <= 0 else f"{saving:.0%}",
                "all" if row.identical else "not all",
            ]
        )
    heads = ["", "processes", "ms/token", "speed-up", "quartiles", "allowed", "realised", "equal"]
    _print_table(heads, cells)


def _print_predicted(planned: "DevicePlan") -> None:
    cells = [["ordinary decoding", "1", f"{planned.ordinary_ms:.3f}", "1.00", "", "1.00"]]
    for row in planned.predicted[:_MOST_ROWS]:
        figures = [f"{row.ms_per_token:.3f}", f"{row.speedup:.2f}", f"{row.allowed_speedup:.2f}"]
        cells.append([row.name, str(row.devices), *figures, f"{row.compute_per_token:.2f}"])
    _print_table(["", "devices", "ms/token", "speed-up", "allowed", "compute"], cells)


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    for heading in heads[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)
