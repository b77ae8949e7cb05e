"""The staged layout for several numbers of stages, with tensor parallelism on as many devices: rows of predictions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ppd_runtime.checks import check_cuts, check_number, check_stages, even_cuts
from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.theory import Times, miss_time
from ppd_runtime.cost_model.tradeoff import MatchRates

Setting = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Cuts, k, and the shares of first boundaries; see `ppd_runtime.cost_model.staged`."""


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

    def as_dict(self) -> dict[str, object]:
        """The fields by name; the time only if times were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def predict(
    num_layers: int,
    setting: Setting,
    num_new_tokens: int,
    times_ms: Times | None = None,
    rows_per_token: float | None = None,
    all_reduce_ms: float | None = None,
) -> StagedTradeoff:
    """One setting's row.

    Args:
        num_layers: the model's.
        setting: cuts, k and shares.
        num_new_tokens: of the text; its first token passes all stages.
        times_ms: in milliseconds; without them only layers take time.
        rows_per_token: rows that are dropped; None: `staged.dropped_rows`.
        all_reduce_ms: tensor parallelism's; None: gpt-fast's on A100 GPUs, without times in its model's layer times.

    Raises:
        ValueError: see `ppd_runtime.cost_model.staged`.
    """
    cuts, k, shares = setting
    ratio = staged.latency_ratio(num_layers, cuts, shares, num_new_tokens, times_ms)
    rows = staged.dropped_rows(k, shares) if rows_per_token is None else rows_per_token
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
        tensor_parallel_speedups=tensor_parallel_speedups(num_layers, len(shares), times_ms, all_reduce_ms),
        latency_ms_per_token=ratio * miss_time(num_layers, times_ms) if times_ms else None,
    )


def tensor_parallel_speedups(
    num_layers: int, devices: int, times_ms: Times | None, all_reduce_ms: float | None = None
) -> tuple[float, float]:
    """Tensor parallelism's speed-up over ordinary decoding for the slower and the faster all-reduce; see `predict`."""
    times = times_ms or Times(layer=staged.GPT_FAST_LAYER_MS)
    fast, slow = staged.GPT_FAST_ALL_REDUCE_MS if all_reduce_ms is None else (all_reduce_ms, all_reduce_ms)
    ordinary = miss_time(num_layers, times)
    slower, faster = (ordinary / staged.tensor_parallel_time(num_layers, devices, times, time) for time in (slow, fast))
    return slower, faster


def given_settings(num_layers: int, stages: int, shares: Sequence[float], ks: Sequence[int]) -> list[Setting]:
    """Even stages, their shares, and each k; raises ValueError for stages or shares that cannot be."""
    cuts = even_cuts(num_layers, stages)
    staged.check_shares(shares, stages)
    return [(cuts, k, tuple(shares)) for k in ks]


def measured_settings(
    num_layers: int, stages: Sequence[int], measured: MatchRates, ks: Sequence[int] | None
) -> list[Setting]:
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


def check_rows(rows_per_token: float | None, all_reduce_ms: float | None) -> None:
    """Raise ValueError for negative rows or times."""
    for name, value in (("rows_per_token", rows_per_token), ("all_reduce_ms", all_reduce_ms)):
        if value is not None:
            check_number(name, value)


def _way_out(measured: MatchRates, number: int) -> str:
    known = sorted({len(shares) for shares in measured.first_boundary.values()})
    others = f"it has those of {', '.join(map(str, known))}, and " if known else ""
    return f"{others}`ppd match-rate --stages {number}` measures them"
