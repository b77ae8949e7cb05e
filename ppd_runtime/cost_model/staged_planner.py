"""First boundaries and a calibration → the staged layout's cuts and k, ranked by predicted time per token."""

from collections.abc import Sequence

from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.plans import StagedPlan
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.cost_model.tradeoff import BoundaryShares


def rank_stages(
    num_layers: int, calibration: Calibration, boundaries: BoundaryShares, max_devices: int, ordinary_ms: float
) -> tuple[StagedPlan, ...]:
    """Every (cuts, k) of `boundaries` that fits within `max_devices`; `ordinary_ms` is ordinary decoding's token.

    Raises:
        ValueError: for cuts that are none of `num_layers`, or shares that cannot be.
    """
    plans = [
        plan_stages(num_layers, cuts, k, shares, calibration, ordinary_ms)
        for (cuts, k), shares in boundaries.items()
        if len(shares) <= max_devices
    ]
    return tuple(sorted(plans, key=lambda row: (row.ms_per_token, row.devices, row.compute_per_token)))


def plan_stages(
    num_layers: int,
    cuts: tuple[int, ...],
    k: int,
    shares: Sequence[float],
    calibration: Calibration,
    ordinary_ms: float,
) -> StagedPlan:
    """What is predicted for one setting; see `staged.token_time` and `stage_times`."""
    ms = staged.token_time(num_layers, cuts, shares, stage_times(num_layers, cuts, k, calibration))
    longest = max(staged.stage_layers(num_layers, cuts))
    return StagedPlan(
        devices=len(shares),
        cuts=cuts,
        k=k,
        first_boundary=tuple(shares),
        ms_per_token=ms,
        speedup=ordinary_ms / ms,
        compute_per_token=staged.compute_per_token(num_layers, cuts, staged.dropped_rows(k, shares)),
        ideal_speedup=num_layers / (longest * staged.expected_first_boundary(shares)),
    )


def stage_times(num_layers: int, cuts: tuple[int, ...], k: int, calibration: Calibration) -> Times:
    """A stage's times in milliseconds: all stages work at once, on passes of k rows, and each pass takes a start, a
    message in and a message out."""
    longest = max(staged.stage_layers(num_layers, cuts))
    # half_factor is for half of the layers; fewer stay in caches no better
    cached = 1 - (1 - calibration.half_factor) * min(1.0, 2 * (num_layers - longest) / num_layers)
    return Times(
        layer=calibration.layer_ms * calibration.contention * cached,
        head=calibration.head_ms,
        exit_head=calibration.exit_head_ms,
        hop=calibration.hop_ms + calibration.pass_ms + 2 * calibration.message_ms,
        width=calibration.width(k),
    )
