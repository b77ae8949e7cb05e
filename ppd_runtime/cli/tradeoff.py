"""`ppd tradeoff`: what pipelined decoding saves and costs, by Theorem 4.1 or the staged layout's formulas."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.cli.stages import (
    USUAL_LAYERS,
    AskedStages,
    Layers,
    StagedOptions,
    predict_staged,
    print_staged,
    refuse_beside_stages,
    refuse_without_stages,
)
from ppd_runtime.config import USUAL_K

if TYPE_CHECKING:
    from ppd_runtime.cost_model.theory import Times
    from ppd_runtime.cost_model.tradeoff import CsvRow, Tradeoff

_EXIT_LAYER, _MATCH_RATE = "20", "0.6837"


@takes(staged=options.group(StagedOptions, make=StagedOptions), times=options.group(options.LayerTimes))
def tradeoff(
    layers: Layers = None,
    exit_layer: Annotated[
        str | None, typer.Option(help="Predict early after this layer; several: 20,30.", show_default=_EXIT_LAYER)
    ] = None,
    k: Annotated[
        str | None, typer.Option(help="Early candidates for each token; several: 1,3,5.", show_default=str(USUAL_K))
    ] = None,
    match_rate: Annotated[
        str | None,
        typer.Option(help="How often a candidate is right; several: 0.5,0.7.", show_default=_MATCH_RATE),
    ] = None,
    match_rates: Annotated[
        Path | None,
        typer.Option(help='Measured rates instead: {"match_rates": {"<exit_layer>": {"<k>": rate}}} in a JSON file.'),
    ] = None,
    stages: Annotated[
        str | None, typer.Option(help="The staged layout with so many stages instead; several: 2,4,8.")
    ] = None,
    *,
    staged: StagedOptions,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    times: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: an object, or a list for several.")] = False,
    out: options.Out = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against compute into this image.")] = None,
) -> None:
    """Predict latency and compute by Theorem 4.1; lists of values give a row for every combination.

    --layer-ms adds the time per token.

    --stages predicts the staged layout, with tensor parallelism on as many devices beside it: from --first-boundary,
    or from the first boundaries that `ppd match-rate --stages` or --cuts wrote into the file of --match-rates.

    --match-rates FILE takes measured rates from a JSON file of the form
    {"match_rates": {"<exit_layer>": {"<k>": rate}}}: all that Theorem 4.1 covers, or those of --exit-layer and --k.
    Where the file notes the model's num_layers, as `ppd match-rate` does, --layers is not needed.
    """
    with one_line_errors(tradeoff):
        from ppd_runtime.cost_model.tradeoff import predict

        check_outputs(out, csv, plot)
        of_passes = _times(**times)
        if stages is not None:
            refuse_beside_stages(stages, exit_layer=exit_layer, match_rate=match_rate, plot=plot)
            predicted = predict_staged(AskedStages(stages, match_rates, layers, k, staged), tokens, of_passes)
            _give(predicted, as_json, out, csv)
            if not as_json:
                print_staged(predicted, staged)
            return
        refuse_without_stages(**asdict(staged))
        num_layers, settings = _settings(layers, exit_layer, k, match_rate, match_rates)
        rows = [predict(num_layers, *setting, tokens, of_passes) for setting in settings]
        _draw(rows, plot)
        _give(rows, as_json, out, csv)
        if not as_json:
            _print_table(rows)


def _draw(rows: "Sequence[Tradeoff]", plot: Path | None) -> None:
    if plot is not None:
        from ppd_runtime.cost_model.plots import draw

        draw(rows, plot)


def _give(rows: "Sequence[CsvRow]", as_json: bool, out: Path | None, csv: Path | None) -> None:
    from ppd_runtime.cost_model.tradeoff import write_csv

    if csv is not None:
        write_csv(rows, csv)
    give_json(rows[0].as_dict() if len(rows) == 1 else [row.as_dict() for row in rows], as_json, out)


def _times(layer_ms: float | None = None, **others: float) -> "Times | None":
    from ppd_runtime.cost_model.theory import Times

    if layer_ms is not None:
        return Times(layer_ms, *(others.get(name, 0.0) for name in ("head_ms", "exit_head_ms", "hop_ms")))
    if others:
        raise ValueError("--head-ms, --exit-head-ms and --hop-ms need --layer-ms as well: give it too")
    return None


def _settings(
    layers: int | None, exit_layer: str | None, k: str | None, match_rate: str | None, file: Path | None
) -> tuple[int, list[tuple[int, int, float]]]:
    from ppd_runtime.cost_model.tradeoff import combine, parse_list

    if file is not None:
        if match_rate is not None:
            raise ValueError(f"--match-rate {match_rate} and --match-rates {file}: give one of them")
        return _measured_settings(layers, exit_layer, k, file)
    return USUAL_LAYERS if layers is None else layers, combine(
        parse_list("--exit-layer", _EXIT_LAYER if exit_layer is None else exit_layer, int),
        parse_list("--k", str(USUAL_K) if k is None else k, int),
        parse_list("--match-rate", _MATCH_RATE if match_rate is None else match_rate, float),
    )


def _measured_settings(
    layers: int | None, exit_layer: str | None, k: str | None, file: Path
) -> tuple[int, list[tuple[int, int, float]]]:
    from ppd_runtime.cost_model.tradeoff import parse_list, read_match_rates, select

    measured = read_match_rates(file)
    num_layers = measured.layers(layers, USUAL_LAYERS)
    if exit_layer is None:
        measured, left_out = measured.covered(num_layers)
        if left_out:
            names = ", ".join(map(str, left_out))
            sys.stderr.write(f"ppd: left out exit layers {names} of {file}: Theorem 4.1 needs at least half depth\n")
    exits = None if exit_layer is None else parse_list("--exit-layer", exit_layer, int)
    return num_layers, select(measured.rates, exits, None if k is None else parse_list("--k", k, int))


def _print_table(rows: "list[Tradeoff]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"Theorem 4.1: {rows[0].num_layers} layers, {rows[0].num_new_tokens} tokens"
    caption = "latency and compute of the whole text in layer passes; ratio and the rest: ordinary decoding is 1"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=0)
    headings = ["exit", "k", "match", "latency", "ratio", "speed-up", "compute", "per token", "per time"]
    timed = rows[0].latency_ms_per_token is not None
    for heading in headings + ["ms/token"] * timed:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [str(row.exit_layer), str(row.k), f"{row.match_rate:g}", f"{row.latency_units:.1f}"]
        cells += [f"{row.latency_ratio:.3f}", f"{row.speedup:.3f}", f"{row.compute_units:.1f}"]
        cells += [f"{row.compute_per_token:.3f}", f"{row.compute_per_time:.3f}"]
        table.add_row(*cells, *([f"{row.latency_ms_per_token:.3f}"] if timed else []))
    Console().print(table)
