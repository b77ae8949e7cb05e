"""First boundaries and a calibration → the staged layout's cuts, k and rows, ranked by predicted time per token."""

from collections.abc import Mapping, Sequence

from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.plans import StagedPlan
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.cost_model.tradeoff import BoundaryShares


def rank_stages(
    num_layers: int,
    calibration: Calibration,
    boundaries: BoundaryShares,
    max_devices: int,
    ordinary_ms: float,
    rows: Sequence[int] | None = None,
) -> tuple[StagedPlan, ...]:
    """Every (cuts, k) of `boundaries` that fits within `max_devices`; `ordinary_ms` is ordinary decoding's token.

    Each has the rows a pass that are fastest: of `rows`, or of 1 to k, for no boundary names more at a time.

    Raises:
        ValueError: for cuts that are none of `num_layers`, or shares that cannot be.
    """
    plans = []
    for (cuts, k), shares in boundaries.items():
        known = {other: row for (its_cuts, other), row in boundaries.items() if its_cuts == cuts}
        setting = (num_layers, cuts, k, known, calibration, ordinary_ms)
        if len(shares) <= max_devices:
            plans.append(min((plan_stages(*setting, most) for most in rows or range(1, k + 1)), key=_order))
    return tuple(sorted(plans, key=_order))


def _order(row: StagedPlan) -> tuple[float, int, float]:
    return row.ms_per_token, row.devices, row.compute_per_token


def plan_stages(
    num_layers: int,
    cuts: tuple[int, ...],
    k: int,
    by_k: Mapping[int, Sequence[float]],
    calibration: Calibration,
    ordinary_ms: float,
    rows: int,
) -> StagedPlan:
    """What is predicted for one setting; see `staged.limited_shares`, `staged.token_time` and `stage_times`."""
    entered = staged.limited_shares(by_k, k, rows)
    ms = staged.token_time(num_layers, cuts, entered, stage_times(num_layers, cuts, rows, calibration))
    passes = staged.expected_first_boundary(entered)
    dropped = min(staged.dropped_rows(k, by_k[k]), rows * passes - 1)
    longest = max(staged.stage_layers(num_layers, cuts))
    return StagedPlan(
        devices=len(entered),
        cuts=cuts,
        k=k,
        rows=rows,
        first_boundary=tuple(by_k[k]),
        ms_per_token=ms,
        speedup=ordinary_ms / ms,
        compute_per_token=staged.compute_per_token(num_layers, cuts, dropped),
        ideal_speedup=num_layers / (longest * passes),
    )


def stage_times(num_layers: int, cuts: tuple[int, ...], rows: int, calibration: Calibration) -> Times:
    """A stage's times in milliseconds: all stages work at once, on passes of so many rows.

    Each pass takes a start, a message in and a message out.
    """
    longest = max(staged.stage_layers(num_layers, cuts))
    # half_factor is for half of the layers; fewer stay in caches no better
    cached = 1 - (1 - calibration.half_factor) * min(1.0, 2 * (num_layers - longest) / num_layers)
    return Times(
        layer=calibration.layer_ms * calibration.contention * cached,
        head=calibration.head_ms,
        exit_head=calibration.exit_head_ms,
        hop=calibration.hop_ms + calibration.pass_ms + 2 * calibration.message_ms,
        width=calibration.width(rows),
    )
