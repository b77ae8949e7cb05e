"""What `ppd tradeoff --stages` predicts and prints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ppd_runtime.cost_model.match_rates import parse_list, read_match_rates
from ppd_runtime.cost_model.staged import check_shares
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.cost_model.tradeoff import (
    OneStageTradeoff,
    StagedSetting,
    StagedTradeoff,
    measured_settings,
    predict_one_stage,
    predict_stages,
)
from ppd_runtime.settings.checks import even_cuts
from ppd_runtime.settings.config import USUAL_K
from ppd_runtime.tune.tables import plain_table

USUAL_LAYERS = 40
"""What `ppd tradeoff` takes where nothing else says it."""


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
    chances: str | None = None
    """With --stages 1: how likely a draft's first, second, … token is right if those before it are: .5,.4,.3."""
    row_cost: float | None = None
    """With --chances: what a further row adds to a pass, as a share of a one-row pass; default: 0."""
    draft_cost: float | None = None
    """With --chances: all drafting between two passes, as a share of a one-row pass; default: 0."""


def predict_staged(
    stages: str,
    file: Path | None,
    layers: int | None,
    ks: Sequence[int] | None,
    own: StagedOptions,
    tokens: int,
    times: Times | None,
) -> Sequence[StagedTradeoff | OneStageTradeoff]:
    """A row for each number of stages, cuts and k, of the shares in the options or of those in a file.

    Of one stage: a row for each number of rows.

    Raises:
        ValueError: for what was given and cannot be, before anything is predicted.
    """
    if own.chances is not None:
        return _one_stage(stages, own, match_rates=file, layers=layers, k=ks, layer_ms=times)
    for name in ("row_cost", "draft_cost"):
        if getattr(own, name) is not None:
            raise ValueError(f"{name}={getattr(own, name):g}: needs --chances as well, give it too")
    rows, all_reduce = own.rows_per_token, own.all_reduce_ms
    if all_reduce is not None and times is None:
        raise ValueError(f"--all-reduce-ms {all_reduce:g}: needs --layer-ms as well, give it too")
    numbers = parse_list("--stages", stages, int)
    if (own.first_boundary is None) == (file is None):
        way_out = "--chances" if numbers == [1] else "one of --first-boundary and --match-rates"
        raise ValueError(f"--stages {stages}: give {way_out}")
    if file is not None:
        measured = read_match_rates(file)
        num_layers = measured.layers(layers, USUAL_LAYERS)
        settings = measured_settings(num_layers, numbers, measured, ks)
    else:
        num_layers = USUAL_LAYERS if layers is None else layers
        settings = _given_settings(num_layers, numbers, str(own.first_boundary), ks or [USUAL_K])
    return [predict_stages(num_layers, setting, tokens, times, rows, all_reduce) for setting in settings]


def _one_stage(stages: str, own: StagedOptions, **others: object) -> list[OneStageTradeoff]:
    if stages.strip() != "1":
        raise ValueError(f"--stages {stages} and --chances {own.chances}: that option is for --stages 1")
    chances = parse_list("--chances", str(own.chances), float)
    used = {"chances", "row_cost", "draft_cost"}
    for name, value in {**asdict(own), **others}.items():
        if value is not None and name not in used:
            raise ValueError(f"--chances {own.chances}: --{name.replace('_', '-')} has no part in it, leave it out")
    return predict_one_stage(chances, own.row_cost or 0.0, own.draft_cost or 0.0)


def _given_settings(num_layers: int, stages: Sequence[int], shares: str, ks: Sequence[int]) -> list[StagedSetting]:
    lists = [parse_list("--first-boundary", part, float) for part in shares.split(";")]
    if len(lists) != len(stages):
        asked = ",".join(map(str, stages))
        way_out = f"`ppd match-rate --stages {asked}` measures them for --match-rates"
        raise ValueError(
            f"--stages {asked} with --first-boundary {shares}: give shares for each, with ';' between; or {way_out}"
        )
    settings: list[StagedSetting] = []
    for number, own in zip(stages, lists, strict=True):
        cuts = even_cuts(num_layers, number)
        check_shares(own, number)
        settings += [(cuts, k, tuple(own)) for k in ks]
    return settings


def print_staged(rows: Sequence[StagedTradeoff | OneStageTradeoff], options: StagedOptions) -> None:
    """The rows as a table."""
    if stages := [row for row in rows if isinstance(row, StagedTradeoff)]:
        _print_stages(stages, options)
        return
    print("One stage and a drafter; ordinary decoding is 1\n")
    cells = [(row.rows, row.tokens_per_pass, row.speedup) for row in rows if isinstance(row, OneStageTradeoff)]
    print(plain_table(["rows", "tokens a pass", "speed-up"], cells))


def _print_stages(rows: Sequence[StagedTradeoff], options: StagedOptions) -> None:
    """Cuts are shown where they are not even."""
    if options.all_reduce_ms is not None:
        how = f"all-reduces of {options.all_reduce_ms:g} ms"
    else:
        how = f"gpt-fast's all-reduces{' and layers' * (rows[0].latency_ms_per_token is None)} on A100 GPUs"
    print(f"The staged layout: {rows[0].num_layers} layers, {rows[0].num_new_tokens} tokens")
    print("E[J]: stage times a token; at most: stages/E[J]; ordinary decoding is 1;")
    print(f"in tensors: tensor parallelism on as many devices,\nwith {how}\n")
    timed = rows[0].latency_ms_per_token is not None
    uneven = any(row.cuts != even_cuts(row.num_layers, row.stages) for row in rows)
    heads = ["stages", *["cuts"] * uneven, "k", "E[J]", "at most", "ratio", "speed-up", "compute", "in tensors"]
    cells = []
    for row in rows:
        slow, fast = (f"{speedup:.2f}" for speedup in row.tensor_parallel_speedups)
        line = [row.stages, *[",".join(map(str, row.cuts))] * uneven, row.k, row.expected_first_boundary]
        line += [f"{row.speedup_bound:.2f}", row.latency_ratio, f"{row.speedup:.2f}", f"{row.compute_per_token:.2f}"]
        cells.append([*line, slow if slow == fast else f"{slow}–{fast}", *[row.latency_ms_per_token] * timed])
    print(plain_table([*heads, *["ms/token"] * timed], cells))
