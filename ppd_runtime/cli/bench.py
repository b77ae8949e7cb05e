"""`ppd bench`: every way of decoding beside ordinary decoding, on the same prompts."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.checks import check_whole
from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_image, check_outputs, check_resume, give_json
from ppd_runtime.cli.progress import progress_bar
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ppd_runtime.tune.comparison.prompt_groups import GroupedPrompt
    from ppd_runtime.tune.comparison.report import ComparisonReport
    from ppd_runtime.tune.comparison.rows import LeftOut
    from ppd_runtime.tune.comparison.run import ComparisonRun

_METHODS = """"all", or rows with commas between them, such as "layerskip:exit_layer=6;num_speculations=2,ppd:k=3". A
row is a method, with a colon and settings where they are not the defaults. Methods: those of `ppd generate` (ppd runs
with launcher=auto), assistant_early_exit and prompt_lookup (transformers' own). Ordinary decoding is always
there."""


@takes(sampling=options.sampling(*options.USUAL_SAMPLING, "ignore_eos"), place=options.COMPILED)
def bench(
    model: options.Model = "demo",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help='A JSON Lines file with a "prompt" (or "turns") in each line, and maybe a "category"; default: '
            '"demo", the shipped ones. May be given again; each file is a group of its own.'
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help=_METHODS)] = "all",
    categories: Annotated[
        str | None, typer.Option(help="Take these alone, such as math,writing; default: all.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take so many prompts of each group (category or file); default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often every prompt is measured.")] = 1,
    *,
    sampling: Settings,
    as_json: options.AsJson = False,
    out: options.KeptOut = None,
    markdown: Annotated[Path | None, typer.Option(help="Write all tables into this file.")] = None,
    chart: Annotated[Path | None, typer.Option(help="Draw a bar chart into this image.")] = None,
    resume: options.Resume = False,
    place: Settings,
) -> None:
    """Compare ways of decoding on the same prompts: speed-up over ordinary decoding, what drafts allow, equality.

    All methods decode a prompt before the next one comes, each time beginning with another; a first run of each is
    dropped. What "all" asks for and the model has no part for is left out, and named.
    """
    with one_line_errors(bench):
        check_resume(resume, out)
        check_outputs(out, markdown, chart)
        check_image(chart)
        params = SamplingParams(**sampling)
        groups = _read_groups(prompts or ["demo"], limit, categories)
        with contextlib.ExitStack() as opened:
            run, left_out = _open(opened, model, methods, place, groups, params, rounds, out, resume)
            _measure(run)
            _report(run, left_out, as_json, out, markdown, chart)


def _read_groups(prompts: list[str], limit: int | None, categories: str | None) -> "list[GroupedPrompt]":
    from ppd_runtime.tune.comparison.prompt_groups import read_groups

    return read_groups(
        prompts, limit, [part.strip() for part in categories.split(",")] if categories is not None else []
    )


def _open(
    opened: contextlib.ExitStack,
    model: str,
    methods: str,
    place: Settings,
    groups: "list[GroupedPrompt]",
    sampling: SamplingParams,
    rounds: int,
    out: Path | None,
    resume: bool,
) -> "tuple[ComparisonRun, list[LeftOut]]":
    """The run, ready to measure, and the rows that it goes without; what is opened is closed with `opened`."""
    from ppd_runtime.methods.ordinary import OrdinaryDecoding
    from ppd_runtime.models.checkpoint.description import describe
    from ppd_runtime.models.checkpoint.generation import generation_defaults
    from ppd_runtime.tune.comparison.methods import Methods
    from ppd_runtime.tune.comparison.rows import check_rows, parse_rows
    from ppd_runtime.tune.comparison.run import ComparisonRun

    check_whole("rounds", rounds, 1)
    info = describe(model, place.get("weights"))
    sampling = sampling.settled(generation_defaults(info, place.get("generation_config", True)).params)
    rows, left_out = check_rows(parse_rows(methods), info, sampling)
    ready = opened.enter_context(Methods(OrdinaryDecoding(model, **place), rows))
    return ComparisonRun(ready, groups, sampling, rounds, out, resume), left_out


def _measure(run: "ComparisonRun") -> None:
    try:
        with progress_bar(run.num_tasks, run.num_done) as on_progress:
            run.measure_rest(on_progress)
    except KeyboardInterrupt:
        if run.partial:
            sys.stderr.write(f"\nppd: {run.num_done} prompts are kept in {run.partial.path}; --resume goes on")
        raise


def _report(
    run: "ComparisonRun",
    left_out: "list[LeftOut]",
    as_json: bool,
    out: Path | None,
    markdown: Path | None,
    chart: Path | None,
) -> None:
    from ppd_runtime.tune.comparison.report import summarise, write_markdown

    report = summarise(run, left_out)
    if chart is not None:
        from ppd_runtime.tune.comparison.chart import bar_of, draw_speedups

        draw_speedups({label: bar_of(figures) for label, figures in report.overall.items()}, report.title(), chart)
    if markdown is not None:
        write_markdown(report, markdown)
    if as_json or out is not None:
        give_json(report.as_dict(), as_json, out)
    if run.partial:
        run.partial.discard()
    if not as_json:
        _print(report)


def _print(report: "ComparisonReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(report.summary(), highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    columns, rows = report.short_table()
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
    for note in report.notes():
        console.print(note, highlight=False, markup=False)
