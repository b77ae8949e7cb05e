"""Latency against compute for one setting: the paper's layout, stages beside tensor parallelism, and one stage."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ppd_runtime.cost_model import drafting, staged, theory
from ppd_runtime.cost_model.match_rates import MatchRates
from ppd_runtime.cost_model.theory import Times, miss_time
from ppd_runtime.settings.checks import check_cuts, check_stages

StagedSetting = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Cuts, k, and the shares of first boundaries; see `ppd_runtime.cost_model.staged`."""


@dataclass(frozen=True)
class Tradeoff:
    """What Theorem 4.1 predicts for one setting."""

    num_layers: int
    exit_layer: int
    k: int
    match_rate: float
    num_new_tokens: int
    latency_units: float
    """Layer times of the whole text."""
    latency_ratio: float
    """Latency as a share of ordinary decoding's."""
    speedup: float
    """Ordinary decoding's latency over this one's."""
    compute_units: float
    """Layer passes of all processes for the whole text."""
    compute_per_token: float
    """Full passes of all layers for a token; ordinary decoding's is 1."""
    compute_per_time: float
    """Processes in use on average; ordinary decoding's is 1."""
    latency_ms_per_token: float | None = None
    """With the overheads of given times; None without times."""


def predict(
    num_layers: int,
    exit_layer: int,
    k: int,
    match_rate: float,
    num_new_tokens: int,
    times_ms: Times | None = None,
) -> Tradeoff:
    """One setting's row; `times_ms` is in milliseconds. Raises ValueError for what Theorem 4.1 does not cover."""
    ratio = theory.latency_ratio(num_layers, exit_layer, match_rate, num_new_tokens)
    setting = (num_layers, exit_layer, k, match_rate, num_new_tokens)
    per_token_ms = None
    if times_ms is not None:
        total_ms = theory.expected_time(num_layers, exit_layer, match_rate, num_new_tokens, times_ms)
        per_token_ms = total_ms / num_new_tokens
    return Tradeoff(
        *setting,
        latency_units=theory.expected_latency(num_layers, exit_layer, match_rate, num_new_tokens),
        latency_ratio=ratio,
        speedup=1 / ratio,
        compute_units=theory.expected_compute(*setting),
        compute_per_token=theory.compute_per_token(*setting),
        compute_per_time=theory.compute_per_time(*setting),
        latency_ms_per_token=per_token_ms,
    )


@dataclass(frozen=True)
class StagedTradeoff:
    """What the formulas of the staged layout predict for one setting."""

    num_layers: int
    stages: int
    cuts: tuple[int, ...]
    k: int
    first_boundary: tuple[float, ...]
    num_new_tokens: int
    expected_first_boundary: float
    """Stage times a token."""
    speedup_bound: float
    """With even stages, for long texts, if only layers take time."""
    latency_ratio: float
    """Latency of the text as a share of ordinary decoding's, with its final heads and what else takes time."""
    speedup: float
    """Ordinary decoding's latency over this one's."""
    rows_per_token: float
    """Rows that run and are dropped."""
    compute_per_token: float
    """Full passes of all layers for a token; ordinary decoding's is 1."""
    tensor_parallel_speedups: tuple[float, float]
    """On as many devices, for slow and for fast all-reduces."""
    latency_ms_per_token: float | None = None
    """None without times."""


def predict_stages(
    num_layers: int,
    setting: StagedSetting,
    num_new_tokens: int,
    times_ms: Times | None = None,
    rows_per_token: float | None = None,
    all_reduce_ms: float | None = None,
) -> StagedTradeoff:
    """One setting's row; times are in milliseconds, and without them only layers take time.

    `rows_per_token` are dropped; None: `staged.dropped_rows`. Without `all_reduce_ms` tensor parallelism has gpt-fast's
    on A100 GPUs, without times in its model's layer times.

    Raises:
        ValueError: see `ppd_runtime.cost_model.staged`.
    """
    cuts, k, shares = setting
    ratio = staged.latency_ratio(num_layers, cuts, shares, num_new_tokens, times_ms)
    rows = staged.dropped_rows(k, shares) if rows_per_token is None else rows_per_token
    times = times_ms or Times(layer=staged.GPT_FAST_LAYER_MS)
    fast, slow = staged.GPT_FAST_ALL_REDUCE_MS if all_reduce_ms is None else (all_reduce_ms, all_reduce_ms)
    parallel = (staged.tensor_parallel_time(num_layers, len(shares), times, time) for time in (slow, fast))
    slower, faster = (miss_time(num_layers, times) / time for time in parallel)
    return StagedTradeoff(
        num_layers,
        len(shares),
        *setting,
        num_new_tokens,
        expected_first_boundary=staged.expected_first_boundary(shares),
        speedup_bound=staged.speedup_bound(shares),
        latency_ratio=ratio,
        speedup=1 / ratio,
        rows_per_token=rows,
        compute_per_token=staged.compute_per_token(num_layers, cuts, rows),
        tensor_parallel_speedups=(slower, faster),
        latency_ms_per_token=ratio * miss_time(num_layers, times_ms) if times_ms else None,
    )


@dataclass(frozen=True)
class OneStageTradeoff:
    """What `drafting` predicts for one stage and passes of so many rows, the newest certain token's and a chain's."""

    chances: tuple[float, ...]
    row_cost: float
    draft_cost: float
    rows: int
    tokens_per_pass: float
    speedup: float
    """Ordinary decoding's latency over this one's."""


def predict_one_stage(chances: Sequence[float], row_cost: float, draft_cost: float) -> list[OneStageTradeoff]:
    """A row for each number of rows up to the whole chain; raises a ValueError as `drafting.speedup` does."""
    path_chances = drafting.chain(chances)
    parts = [path_chances[:guesses] for guesses in range(len(path_chances) + 1)]
    return [
        OneStageTradeoff(
            *(tuple(chances), row_cost, draft_cost, 1 + len(part)),
            tokens_per_pass=drafting.tokens_per_pass(part),
            speedup=drafting.speedup(part, row_cost, draft_cost),
        )
        for part in parts
    ]


def row_dict(row: Tradeoff | StagedTradeoff | OneStageTradeoff) -> dict[str, object]:
    """A row's fields by name; the time only if times were given."""
    return {name: value for name, value in asdict(row).items() if value is not None}


def measured_settings(
    num_layers: int, stages: Sequence[int], measured: MatchRates, ks: Sequence[int] | None
) -> list[StagedSetting]:
    """All that was measured for these numbers of stages; only for `ks` if they are given.

    Raises:
        ValueError: for a number of stages or a k that was not measured, or cuts that are not the model's.
    """
    settings = []
    for number in stages:
        check_stages(num_layers, number)
        by_cuts = [row for row in sorted(measured.first_boundary.items()) if len(row[1]) == number]
        if not by_cuts:
            raise ValueError(f"{measured.source}: no first boundaries of {number} stages; {_way_out(measured, number)}")
        known = sorted({k for (_, k), _ in by_cuts})
        for k in ks or ():
            if k not in known:
                choice = ", ".join(map(str, known))
                raise ValueError(f"no first boundaries of {number} stages with k={k}: choose among {choice}")
        settings += [(cuts, k, shares) for (cuts, k), shares in by_cuts if ks is None or k in ks]
    for cuts, _, _ in settings:
        check_cuts(num_layers, cuts)
    return settings


def _way_out(measured: MatchRates, number: int) -> str:
    known = sorted({len(shares) for shares in measured.first_boundary.values()})
    others = f"it has those of {', '.join(map(str, known))}, and " if known else ""
    return f"{others}`ppd match-rate --stages {number}` measures them"
