"""`ppd tradeoff`: what pipelined decoding saves and costs, by Theorem 4.1 or the staged layout's formulas."""

import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.cli.stages import USUAL_LAYERS, StagedOptions, predict_staged, print_staged
from ppd_runtime.cost_model.match_rates import parse_list, read_match_rates, select
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.cost_model.tradeoff import Tradeoff, predict, row_dict
from ppd_runtime.settings.config import USUAL_K
from ppd_runtime.tune.tables import plain_table

_EXIT_LAYER, _MATCH_RATE = "20", "0.6837"


@takes(staged=options.group(StagedOptions, make=StagedOptions), times=options.group(options.LayerTimes))
def tradeoff(
    layers: Annotated[
        int | None,
        typer.Option(
            help="Decoder layers of the model; default: what --match-rates says.", show_default=str(USUAL_LAYERS)
        ),
    ] = None,
    exit_layer: Annotated[
        str | None, typer.Option(help="Predict early after this layer; several: 20,30.", show_default=_EXIT_LAYER)
    ] = None,
    k: Annotated[
        str | None, typer.Option(help="Early candidates for each token; several: 1,3,5.", show_default=str(USUAL_K))
    ] = None,
    match_rate: Annotated[
        str | None, typer.Option(help="How often a candidate is right; several: 0.5,0.7.", show_default=_MATCH_RATE)
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
) -> None:
    """Predict latency and compute by Theorem 4.1; lists of values give a row for every combination.

    --layer-ms adds the time per token. --match-rates takes all measured rates that Theorem 4.1 covers, or those of
    --exit-layer and --k.

    --stages predicts the staged layout, with tensor parallelism on as many devices beside it: from --first-boundary,
    or from the first boundaries that `ppd match-rate --stages` or --cuts wrote into the file of --match-rates.
    --stages 1 predicts one process with a drafter, from --chances.
    """
    with one_line_errors(tradeoff):
        check_outputs(out)
        of_passes = _times(**times)
        ks = None if k is None else parse_list("--k", k, int)
        if stages is not None:
            _refuse(f"--stages {stages} and {{}}: that option is the paper's layout's, leave one of them out",
                    exit_layer=exit_layer, match_rate=match_rate)  # fmt: skip
            staged_rows = predict_staged(stages, match_rates, layers, ks, staged, tokens, of_passes)
            rows = [row_dict(row) for row in staged_rows]
        else:
            _refuse("{}: is the staged layout's, give --stages as well", **asdict(staged))
            num_layers, settings = _settings(layers, exit_layer, ks, match_rate, match_rates)
            papers_rows = [predict(num_layers, *setting, tokens, of_passes) for setting in settings]
            rows = [row_dict(row) for row in papers_rows]
        give_json(rows[0] if len(rows) == 1 else rows, as_json, out)
        if not as_json and stages is not None:
            print_staged(staged_rows, staged)
        elif not as_json:
            _print_table(papers_rows)


def _refuse(line: str, **given: object) -> None:
    """Raise ValueError for the first option that was given, which the line has a place for."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(line.format(f"--{name.replace('_', '-')} {value}"))


def _times(layer_ms: float | None = None, **others: float) -> Times | None:
    if layer_ms is not None:
        return Times(layer_ms, *(others.get(name, 0.0) for name in ("head_ms", "exit_head_ms", "hop_ms")))
    if others:
        raise ValueError("--head-ms, --exit-head-ms and --hop-ms need --layer-ms as well: give it too")
    return None


def _settings(
    layers: int | None, exit_layer: str | None, ks: list[int] | None, match_rate: str | None, file: Path | None
) -> tuple[int, list[tuple[int, int, float]]]:
    """The model's layers, and each exit layer with k and match rate: as given, or as measured."""
    exits = None if exit_layer is None else parse_list("--exit-layer", exit_layer, int)
    if file is None:
        rates = parse_list("--match-rate", _MATCH_RATE if match_rate is None else match_rate, float)
        given = itertools.product(exits or [int(_EXIT_LAYER)], ks or [USUAL_K], rates)
        return USUAL_LAYERS if layers is None else layers, list(given)
    if match_rate is not None:
        raise ValueError(f"--match-rate {match_rate} and --match-rates {file}: give one of them")
    measured = read_match_rates(file)
    num_layers = measured.layers(layers, USUAL_LAYERS)
    if exits is None:
        measured, left_out = measured.covered(num_layers)
        if left_out:
            names = ", ".join(map(str, left_out))
            sys.stderr.write(f"ppd: left out exit layers {names} of {file}: Theorem 4.1 needs at least half depth\n")
    return num_layers, select(measured.rates, exits, ks)


def _print_table(rows: list[Tradeoff]) -> None:
    print(f"Theorem 4.1: {rows[0].num_layers} layers, {rows[0].num_new_tokens} tokens; ordinary decoding is 1\n")
    timed = rows[0].latency_ms_per_token is not None
    heads = ["exit", "k", "match", "ratio", "speed-up", "compute per token", "compute per time"]
    cells = []
    for row in rows:
        compute = [row.compute_per_token, row.compute_per_time]
        line = [row.exit_layer, row.k, f"{row.match_rate:g}", row.latency_ratio, row.speedup, *compute]
        cells.append([*line, *[row.latency_ms_per_token] * timed])
    print(plain_table([*heads, *["ms/token"] * timed], cells))
