"""`ppd plan`: whether pipelined decoding pays here, and with which exit layer, k and number of workers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.config import ALL_FORMATS
from ppd_runtime.cost_model.memory import GivenMemory
from ppd_runtime.host import available_cores
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ppd_runtime.calibration.planning import Given, Planned
    from ppd_runtime.cost_model.plans import Alternative, Plan, Ranking, StagedPlan

_MOST_ROWS = 12


@dataclass(frozen=True)
class PlanInputs:
    """What need not be measured, and what to plan with."""

    match_rates: Path | None = None
    """What `ppd match-rate --out` wrote, instead of measuring rates."""
    calibration: Path | None = None
    """What `ppd plan --out` wrote, instead of measuring times."""
    layers: int | None = None
    """Decoder layers, where the match rates' file lacks them."""
    k: str | None = None
    """Candidates to plan with, such as 1,3; default: all that fit."""
    workers: str | None = None
    """Sub-processes to plan with, such as 1,2; default: all that fit, up to k."""
    rows: str | None = None
    """Tokens of a stage's pass to plan with, such as 1,4; default: what a runtime chooses."""
    width: tuple[str, ...] = ()
    """N:FACTOR, a pass over N candidates in passes over one; may be given again."""

    def given(
        self, times: options.LayerTimes, run_ahead: bool, all_reduce_ms: float | None, memory: GivenMemory
    ) -> "Given":
        """As the library has it; ValueError for what cannot be."""
        from ppd_runtime.calibration.planning import Given
        from ppd_runtime.cost_model.tradeoff import parse_factors, parse_list

        ks = None if self.k is None else parse_list("--k", self.k, int)
        counts = None if self.workers is None else parse_list("--workers", self.workers, int)
        rows = None if self.rows is None else parse_list("--rows", self.rows, int)
        widths = parse_factors("--width", self.width)
        known = (self.match_rates, self.calibration, self.layers, ks, asdict(times), counts, widths)
        return Given(*known, run_ahead, rows, all_reduce_ms, memory)


@takes(
    known=options.group(PlanInputs, make=PlanInputs),
    times=options.group(options.LayerTimes, make=options.LayerTimes),
    memory=options.group(GivenMemory),
    sampling=options.sampling(*options.USUAL_SAMPLING, max_new_tokens=64),
    place=options.COMPILED,
)
def plan(
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    devices: Annotated[
        int | None,
        typer.Option(help="CPU cores or GPUs to plan for, one for each process; default: the CPU cores here."),
    ] = None,
    *,
    known: PlanInputs,
    run_ahead: Annotated[
        bool, typer.Option(help="With k=1 and the exit at half depth, plan with running ahead, the runtime's default.")
    ] = True,
    times: options.LayerTimes,
    memory: Settings,
    tensor_parallel_efficiency: Annotated[
        float | None,
        typer.Option(
            help="Rank tensor parallelism with this speed-up over devices; default: where it was measured, with that."
        ),
    ] = None,
    all_reduce_ms: Annotated[
        float | None, typer.Option(help="Or rank it with all-reduces of this time, two for each layer.")
    ] = None,
    sampling: Settings,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
    out: options.Out = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with sliders here; it needs no network.")] = None,
    place: Settings,
) -> None:
    """Rank exit layers, k and workers by predicted time per token, beside ordinary decoding and tensor parallelism.

    Even stages of the staged layout are ranked as well, up to a stage for each device; with --match-rates, those whose
    first boundaries the file has (`ppd match-rate --stages`).

    A layout whose fullest device would hold more than --memory-gb is left out, and so is one that this machine has no
    memory for where the model is measured.

    What is not given is measured here. With --match-rates and either --calibration or all four times nothing is.
    """
    with one_line_errors(plan):
        from ppd_runtime.calibration.planning import Subject, plan_with
        from ppd_runtime.cost_model.planner import check_request

        check_outputs(out, html)
        max_devices = available_cores() if devices is None else devices
        check_request(max_devices, tensor_parallel_efficiency, all_reduce_ms)
        given = known.given(times, run_ahead, all_reduce_ms, GivenMemory(**memory))
        subject = Subject(model, prompts, limit, SamplingParams(**sampling), **place)
        planned = plan_with(given, max_devices, tensor_parallel_efficiency, subject, show_progress)
        _give(planned, model, as_json, out, html)


def _give(planned: "Planned", model: str, as_json: bool, out: Path | None, html: Path | None) -> None:
    from ppd_runtime.cost_model.report import page_data, plan_data, write_page

    found = (model, planned.ranking, planned.calibration, planned.rates)
    if html is not None:
        write_page(page_data(*found), html)
    give_json(plan_data(*found), as_json, out)
    if not as_json:
        _print(planned, model)


def _print(planned: "Planned", model: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, ranking = Console(), planned.ranking
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    sized = ["GB"] if ranking.ordinary.memory_gb is not None else []
    for heading in ("exit", "k", "devices", "match", "ms/token", "speed-up", "compute", *sized):
        table.add_column(heading, justify="right", no_wrap=True)
    rows: list[Plan | StagedPlan | Alternative] = [ranking.ordinary, *ranking.parallel]
    rows += [*ranking.plans[:_MOST_ROWS], *ranking.staged[:_MOST_ROWS]]
    for row in sorted(rows, key=lambda row: row.ms_per_token):
        table.add_row(*_cells(ranking, row))
    devices = f"{ranking.max_devices} device{'s' * (ranking.max_devices > 1)}"
    few_bits = f", {planned.rates.weights} weights" * (planned.rates.weights in ALL_FORMATS)
    compiled = ", compiled" * bool(planned.calibration.compiled)
    summary = f"{model}{few_bits}{compiled}, {ranking.num_layers} layers, at most {devices}"
    console.print(f"{summary}: predicted for a token after the first", highlight=False, markup=False)
    console.print(table, highlight=False)
    for note in (*planned.notes, *ranking.footnotes):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    console.print(ranking.verdict, highlight=False, markup=False, soft_wrap=True)


def _cells(ranking: "Ranking", row: "Plan | StagedPlan | Alternative") -> list[str]:
    from ppd_runtime.cost_model.plans import Plan, StagedPlan

    figures = [f"{row.ms_per_token:.3f}", f"{row.speedup:.2f}", f"{row.compute_per_token:.2f}"]
    figures += [] if row.memory_gb is None else [f"{row.memory_gb:.3g}"]
    if isinstance(row, Plan):
        number = f"{ranking.plans.index(row) + 1}{', running ahead' if row.runs_ahead else ''}"
        return [number, str(row.exit_layer), str(row.k), str(row.devices), f"{row.match_rate:.3f}", *figures]
    if isinstance(row, StagedPlan):
        several = f" ({row.rows} rows)" if row.rows > 1 else ""
        return [f"{row.devices} stages{several}", "", str(row.k), str(row.devices), "", *figures]
    return [row.name if row.fits else "ordinary, too large", "", "", str(row.devices), "", *figures]
