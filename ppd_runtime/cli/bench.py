"""`ppd bench`: every way of decoding beside ordinary decoding, on the same prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import check_whole

if TYPE_CHECKING:
    from ppd_runtime.tune.bench import BenchReport

_METHODS = """"all", or rows with commas between them, such as "layerskip:exit_layer=6;num_speculations=2,ppd:k=3". A
row is a method, with a colon and settings where they are not the defaults. Methods: those of `ppd generate` (ppd runs
with launcher=auto), assistant_early_exit and prompt_lookup (transformers' own). Ordinary decoding is always
there."""


@takes(sampling=options.sampling(*options.USUAL_SAMPLING, "ignore_eos"), place=options.COMPILED)
def bench(
    model: options.Model = "demo",
    prompts: Annotated[
        str,
        typer.Option(
            help='A JSON Lines file with a "prompt" (or "turns") in each line, and maybe a "category", or "demo" for '
            "the shipped prompts."
        ),
    ] = "demo",
    methods: Annotated[str, typer.Option(help=_METHODS)] = "all",
    limit: Annotated[int | None, typer.Option(help="Take so many prompts of each category; default: all.")] = None,
    rounds: Annotated[int, typer.Option(help="How often every prompt is measured.")] = 1,
    *,
    sampling: Settings,
    as_json: options.AsJson = False,
    out: options.Out = None,
    markdown: Annotated[Path | None, typer.Option(help="Write all tables into this file.")] = None,
    place: Settings,
) -> None:
    """Compare ways of decoding on the same prompts: speed-up over ordinary decoding, what drafts allow, equality.

    All methods decode a prompt before the next one comes, each time beginning with another; a first run of each is
    dropped. What "all" asks for and the model has no part for is left out, and named.
    """
    with one_line_errors(bench):
        check_outputs(out, markdown)
        report = _measured(model, prompts, limit, methods, SamplingParams(**sampling), rounds, place)
        if markdown is not None:
            from ppd_runtime.files.atomic import atomic_file

            with atomic_file(markdown) as unfinished:
                unfinished.write_text(report.markdown(), encoding="utf-8")
        give_json(report.as_dict(), as_json, out)
        if not as_json:
            _print(report)


def _measured(
    model: str, prompts: str, limit: int | None, methods: str, params: SamplingParams, rounds: int, place: Settings
) -> "BenchReport":
    from ppd_runtime.methods.ordinary import OrdinaryDecoding
    from ppd_runtime.models.checkpoint.description import describe
    from ppd_runtime.models.checkpoint.generation import generation_defaults
    from ppd_runtime.tune.bench import bench_rows, read_groups
    from ppd_runtime.tune.rows import check_rows, parse_rows

    check_whole("rounds", rounds, 1)
    groups = read_groups(prompts, limit)
    info = describe(model, place.get("weights"))
    params = params.settled(generation_defaults(info, place.get("generation_config", True)).params)
    rows, left_out = check_rows(parse_rows(methods), info, params)
    ordinary = OrdinaryDecoding(model, **place)
    report = bench_rows(
        ordinary, rows, left_out, groups, params, rounds, lambda done, of: show_progress(f"prompt {done} of {of} done")
    )
    show_progress("")
    return report


def _print(report: "BenchReport") -> None:
    from ppd_runtime.tune.bench import SHORT_COLUMNS
    from ppd_runtime.tune.tables import plain_table

    print(
        report.summary(), plain_table(["method", *SHORT_COLUMNS], report.cells(SHORT_COLUMNS)), sep="\n\n", end="\n\n"
    )
    for note in report.notes():
        print(note)
