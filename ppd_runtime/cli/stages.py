"""What `ppd tradeoff --stages` predicts and prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.config import USUAL_K

if TYPE_CHECKING:
    from ppd_runtime.cost_model.staged_tradeoff import Setting, StagedTradeoff
    from ppd_runtime.cost_model.theory import Times

USUAL_LAYERS = 40
"""What `ppd tradeoff` takes where nothing else says it."""
Layers = Annotated[
    int | None,
    typer.Option(help="Decoder layers of the model; default: what --match-rates says.", show_default=str(USUAL_LAYERS)),
]


@dataclass(frozen=True)
class StagedOptions:
    """Options of `ppd tradeoff` that the staged layout alone has."""

    first_boundary: str | None = None
    """With --stages: how often boundary 1, 2, …, or none is the first to name the right token: .8,.1,.05,.05; for
    several numbers of stages with ';' between: '.9,.1;.8,.1,.05,.05'."""
    rows_per_token: float | None = None
    """With --stages: further rows a token whose work is dropped; default: by k and the first boundaries."""
    all_reduce_ms: float | None = None
    """With --stages: tensor parallelism's all-reduce; default: 0.018 to 0.029, as in gpt-fast."""


@dataclass(frozen=True)
class AskedStages:
    """What `ppd tradeoff --stages` was asked for."""

    stages: str
    match_rates: Path | None
    layers: int | None
    k: str | None
    own: StagedOptions


def refuse_beside_stages(stages: str, **given: object) -> None:
    """Raise ValueError for an option of the paper's layout."""
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')} {value}".strip()
            raise ValueError(
                f"--stages {stages} and {option}: that option is the paper's layout's, leave one of them out"
            )


def refuse_without_stages(**given: object) -> None:
    """Raise ValueError for an option of the staged layout."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: is the staged layout's, give --stages as well")


def predict_staged(asked: AskedStages, tokens: int, times: "Times | None") -> "list[StagedTradeoff]":
    """A row for each number of stages, cuts and k.

    Raises:
        ValueError: for what was given and cannot be, before anything is predicted.
    """
    from ppd_runtime.cost_model.staged_tradeoff import check_rows, predict
    from ppd_runtime.cost_model.tradeoff import parse_list

    rows, all_reduce = asked.own.rows_per_token, asked.own.all_reduce_ms
    check_rows(rows, all_reduce)
    if all_reduce is not None and times is None:
        raise ValueError(f"--all-reduce-ms {all_reduce:g}: needs --layer-ms as well, give it too")
    stages = parse_list("--stages", asked.stages, int)
    ks = None if asked.k is None else parse_list("--k", asked.k, int)
    num_layers, settings = _settings(stages, asked.own.first_boundary, asked.match_rates, asked.layers, ks)
    return [predict(num_layers, setting, tokens, times, rows, all_reduce) for setting in settings]


def _settings(
    stages: Sequence[int], shares: str | None, file: Path | None, layers: int | None, ks: Sequence[int] | None
) -> "tuple[int, list[Setting]]":
    """The model's layers, and what is known of so many stages: from `shares` as an option has them, or from a file.

    Raises:
        ValueError: for both or neither, or for what cannot be.
    """
    from ppd_runtime.cost_model.staged_tradeoff import given_settings, measured_settings
    from ppd_runtime.cost_model.tradeoff import parse_list, read_match_rates

    asked = ",".join(map(str, stages))
    if (shares is None) == (file is None):
        raise ValueError(f"--stages {asked}: give one of --first-boundary and --match-rates")
    if file is not None:
        measured = read_match_rates(file)
        num_layers = measured.layers(layers, USUAL_LAYERS)
        return num_layers, measured_settings(num_layers, stages, measured, ks)
    num_layers = USUAL_LAYERS if layers is None else layers
    lists = [parse_list("--first-boundary", part, float) for part in str(shares).split(";")]
    if len(lists) != len(stages):
        way_out = f"`ppd match-rate --stages {asked}` measures them for --match-rates"
        raise ValueError(
            f"--stages {asked} with --first-boundary {shares}: give shares for each, with ';' between; or {way_out}"
        )
    by_stages = zip(stages, lists, strict=True)
    given = [given_settings(num_layers, number, own, ks or [USUAL_K]) for number, own in by_stages]
    return num_layers, [setting for settings in given for setting in settings]


def print_staged(rows: "Sequence[StagedTradeoff]", options: StagedOptions) -> None:
    """The rows as a table; cuts are shown where they are not even."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ppd_runtime.checks import even_cuts

    title = f"The staged layout: {rows[0].num_layers} layers, {rows[0].num_new_tokens} tokens"
    table = Table(title=title, caption=_caption(options, rows[0]), box=box.SIMPLE_HEAD, padding=0)
    timed = rows[0].latency_ms_per_token is not None
    uneven = any(row.cuts != even_cuts(row.num_layers, row.stages) for row in rows)
    headings = ["stages", *["cuts"] * uneven, "k", "E[J]", "at most", "ratio", "speed-up", "compute", "tensor parallel"]
    for heading in headings + ["ms/token"] * timed:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        slow, fast = (f"{speedup:.2f}" for speedup in row.tensor_parallel_speedups)
        cells = [str(row.stages), *[",".join(map(str, row.cuts))] * uneven, str(row.k)]
        cells += [f"{row.expected_first_boundary:.3f}", f"{row.speedup_bound:.2f}", f"{row.latency_ratio:.3f}"]
        cells += [f"{row.speedup:.2f}", f"{row.compute_per_token:.2f}", slow if slow == fast else f"{slow}–{fast}"]
        table.add_row(*cells, *([f"{row.latency_ms_per_token:.3f}"] if timed else []))
    Console().print(table)


def _caption(options: StagedOptions, row: "StagedTradeoff") -> str:
    if options.all_reduce_ms is not None:
        how = f"all-reduces of {options.all_reduce_ms:g} ms"
    else:
        how = f"gpt-fast's all-reduces{' and layers' * (row.latency_ms_per_token is None)} on A100 GPUs"
    return (
        "E[J]: stage times a token; at most: stages/E[J]; the rest: ordinary decoding is 1; "
        f"tensor parallel: its speed-up on as many devices, with {how}"
    )
