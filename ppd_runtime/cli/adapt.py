"""`ppd adapt`: train the heads and the drafter that stages need on a model's own texts."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cost_model.match_rates import parse_list
from ppd_runtime.settings.config import RuntimeConfig
from ppd_runtime.settings.fields import summary

if TYPE_CHECKING:
    from ppd_runtime.training.adapt.report import AdaptReport, Comparison


@takes(place=options.ON_ALL_CORES)
def adapt(
    model: Annotated[str, typer.Argument(help=summary(RuntimeConfig, "model"))],
    minutes: Annotated[float, typer.Option(help="Time for all steps but loading and measuring layouts.")] = 20.0,
    prompts: Annotated[
        str | None, typer.Option(help='A JSON Lines file with a "prompt" in each line; default: the package\'s own.')
    ] = None,
    texts: Annotated[
        str | None, typer.Option(help='A file of texts to read in place of answers: a .jsonl of "text", or plain.')
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="Numbers of stages to train for, such as 2,4, which is the default.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to train for in their place, such as 8,15,22.")] = None,
    out: Annotated[Path | None, typer.Option(help="The new folder; default: where stages find it.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the new parts even where those that are there foresee more.")
    ] = False,
    disk_gb: Annotated[float, typer.Option(help="Most gigabytes of hidden states on disk meanwhile.")] = 4.0,
    *,
    place: Settings,
    as_json: options.AsJson = False,
) -> None:
    """Train heads for a model's stages and a drafter on its own answers; report what they gain on held-out prompts.

    The model answers prompts, its hidden states are kept on disk, and all parts learn from them. With 5 minutes
    or more, the layouts that fit this machine are measured with the parts. A run that was stopped goes on with
    the same command. Texts stay the same to the token: these parts only guess.
    """
    with one_line_errors(adapt):
        from ppd_runtime.training.adapt.run import adapt as run
        from ppd_runtime.training.adapt.settings import AdaptSettings

        settings = AdaptSettings(
            minutes=minutes,
            prompts=prompts,
            texts=texts,
            stages=None if stages is None else parse_list("--stages", stages, int),
            layers=None if layers is None else parse_list("--layers", layers, int),
            out=out,
            replace=replace,
            disk_gb=disk_gb,
        )
        try:
            report = run(model, settings, place=place, progress=show_progress)
        except KeyboardInterrupt:
            sys.stderr.write("ppd: what is done is kept; the same command goes on\n")
            raise
        show_progress("")
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        _print(report)


def _print(report: "AdaptReport") -> None:
    took = f"{report.texts} texts, {report.places} tokens, {report.steps} steps, {report.minutes:.1f} min"
    print(f"heads and drafter of {report.model}: {took}")
    shares = f"{report.greedy.covered:.3f}, at temperature 1 {report.sampled.covered:.3f}"
    print(f"named on {sum(report.held_out.values())} held-out tokens; the shortlist has {shares}\n\ngreedy\n")
    _print_comparison(report.greedy, report.held_out)
    print("\nat temperature 1, ranked with the shared noise\n")
    _print_comparison(report.sampled, report.held_out)
    _print_plan(report.plan)
    if report.stayed:
        print("", "what was there stays where it foresees as much or more (--replace takes the new parts):", sep="\n")
        print(*report.stayed, sep="\n")
    print(f"\nthey are in {report.folder}: {', '.join(f'layer {one.layer} {one.kind}' for one in report.heads)}")


def _print_plan(plan: dict[str, Any]) -> None:
    from ppd_runtime.tune.tables import plain_table

    if "rows" in plan:
        print(f"\n{plan['title']}\n", plain_table(plan["heads"], plan["rows"]), sep="\n")
    print("", *plan.get("cautions", ()), plan["verdict"], sep="\n")


def _print_comparison(found: "Comparison", kinds: Iterable[str]) -> None:
    from ppd_runtime.training.adapt.report import ALL, KS
    from ppd_runtime.tune.tables import plain_table

    rows = [
        [layer.layer, kind, *(f"{layer.before[kind][k]:.2f} → {layer.after[kind][k]:.2f}" for k in KS)]
        for layer in found.layers
        for kind in (ALL, *kinds)
    ]
    rows += [
        [f"drafter, token {number}", kind, *(f"{own[kind][k]:.2f}" for k in KS)]
        for number, own in enumerate(found.drafter, 1)
        for kind in (ALL, *kinds)
        if kind in own
    ]
    print(plain_table(["layer", "kind", *(f"k={k}" for k in KS)], rows))
    bounds = [
        [len(row.cuts) + 1, ",".join(map(str, row.cuts)), *(f"{row.before[k]:.2f} → {row.after[k]:.2f}" for k in KS)]
        for row in found.stages
    ]
    print("\nspeed-up at most, if layers alone took time\n")
    print(plain_table(["stages", "cuts", *(f"k={k}" for k in KS)], bounds))
