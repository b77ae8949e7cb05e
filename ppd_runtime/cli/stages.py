"""What `ppd tradeoff --stages` predicts and prints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppd_runtime.cost_model.match_rates import parse_list, read_match_rates
from ppd_runtime.cost_model.staged import check_shares
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.cost_model.tradeoff import StagedSetting, StagedTradeoff, measured_settings, predict_stages
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


def predict_staged(
    stages: str,
    file: Path | None,
    layers: int | None,
    ks: Sequence[int] | None,
    own: StagedOptions,
    tokens: int,
    times: Times | None,
) -> list[StagedTradeoff]:
    """A row for each number of stages, cuts and k, of the shares in the options or of those in a file.

    Raises:
        ValueError: for what was given and cannot be, before anything is predicted.
    """
    rows, all_reduce = own.rows_per_token, own.all_reduce_ms
    if all_reduce is not None and times is None:
        raise ValueError(f"--all-reduce-ms {all_reduce:g}: needs --layer-ms as well, give it too")
    numbers = parse_list("--stages", stages, int)
    if (own.first_boundary is None) == (file is None):
        raise ValueError(f"--stages {stages}: give one of --first-boundary and --match-rates")
    if file is not None:
        measured = read_match_rates(file)
        num_layers = measured.layers(layers, USUAL_LAYERS)
        settings = measured_settings(num_layers, numbers, measured, ks)
    else:
        num_layers = USUAL_LAYERS if layers is None else layers
        settings = _given_settings(num_layers, numbers, str(own.first_boundary), ks or [USUAL_K])
    return [predict_stages(num_layers, setting, tokens, times, rows, all_reduce) for setting in settings]


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


def print_staged(rows: Sequence[StagedTradeoff], options: StagedOptions) -> None:
    """The rows as a table; cuts are shown where they are not even."""
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
