"""First boundaries and a calibration → the staged layout's cuts, k and rows, ranked by simulated time per token.

The formulas of `cost_model.staged` do not know how many rows a pass comes to have, that what stands behind wrong
candidates takes room in it, or that a message waits for the end of a pass. The machines do.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence

from ppd_runtime.calibration.simulate_stages import StagedSetting, simulate_staged_runs
from ppd_runtime.calibration.simulated_stages import StageTimes
from ppd_runtime.checks import stage_layers
from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork
from ppd_runtime.cost_model.planner import ordinary_ms
from ppd_runtime.cost_model.plans import StagedPlan
from ppd_runtime.cost_model.tradeoff import BoundaryShares
from ppd_runtime.launch.supervisor import Progress

_TEXTS, _TOKENS = 5, 64  # drawn alike for all settings; the first serves the heads' calibration, and is dropped


def rank_stages(
    num_layers: int,
    calibration: Calibration,
    boundaries: BoundaryShares,
    max_devices: int,
    rows: Sequence[int],
    progress: Progress = lambda line: None,
) -> tuple[StagedPlan, ...]:
    """Every (cuts, k) of `boundaries` that fits within `max_devices`, each with those of `rows` that are fastest.

    Raises:
        ValueError: for cuts that are none of `num_layers`, or shares that cannot be.
    """
    fitting = {setting: shares for setting, shares in boundaries.items() if len(shares) <= max_devices}
    plans = []
    for number, ((cuts, k), shares) in enumerate(fitting.items(), start=1):
        progress(f"simulating stages, setting {number} of {len(fitting)}")
        ranks = _ranks({other: row for (its_cuts, other), row in boundaries.items() if its_cuts == cuts}, k)
        setting = (num_layers, cuts, k, shares, calibration)
        plans.append(min((plan_stages(*setting, most, ranks) for most in rows), key=_order))
    return tuple(sorted(plans, key=_order))


def _order(row: StagedPlan) -> tuple[float, int, float]:
    return row.ms_per_token, row.devices, row.compute_per_token


def _ranks(by_k: Mapping[int, Sequence[float]], k: int) -> tuple[float, ...]:
    """How often each of k ranks holds the right token at the first boundary; empty where only k's shares are known."""
    known = {0: 0.0} | {count: shares[0] for count, shares in by_k.items() if count <= k}
    if len(known) == 2 and k > 1:
        return ()
    ranks: list[float] = []
    for low, high in itertools.pairwise(sorted(known)):
        ranks += [max(0.0, known[high] - known[low]) / (high - low)] * (high - low)
    return tuple(ranks) if sum(ranks) else ()


def plan_stages(
    num_layers: int,
    cuts: tuple[int, ...],
    k: int,
    shares: Sequence[float],
    calibration: Calibration,
    rows: int,
    ranks: tuple[float, ...] = (),
) -> StagedPlan:
    """What is predicted for one setting; see `stage_times`, and for `ranks` `StagedSetting`."""
    times = stage_times(num_layers, cuts, rows, calibration)
    jitter = _stages(num_layers, cuts, rows, calibration).jitter
    setting = StagedSetting(num_layers, cuts, k, rows, _TOKENS, times, jitter, ranks=ranks)
    runs = simulate_staged_runs(setting, shares, _TEXTS)[1:]
    ms = statistics.fmean(run.time_per_token for run in runs)
    dropped = statistics.fmean(run.rows_per_token for run in runs) - 1
    longest = max(stage_layers(num_layers, cuts))
    return StagedPlan(
        devices=len(shares),
        cuts=cuts,
        k=k,
        rows=rows,
        first_boundary=tuple(shares),
        ms_per_token=ms,
        speedup=ordinary_ms(num_layers, calibration) / ms,
        compute_per_token=staged.compute_per_token(num_layers, cuts, max(0.0, dropped)),
        ideal_speedup=num_layers / (longest * staged.expected_first_boundary(shares)),
    )


def stage_times(num_layers: int, cuts: tuple[int, ...], rows: int, calibration: Calibration) -> StageTimes:
    """A stage's times in milliseconds, all stages at work: as they were measured, else from those of its parts.

    What processes spend on a message is part of their passes, and no longer of its hop.
    """
    measured = _stages(num_layers, cuts, rows, calibration)
    return StageTimes(
        layer=measured.layer_ms,
        head=calibration.head_ms,
        exit_head=measured.exit_head_ms,
        hop=max(0.0, calibration.hop_ms - 2 * calibration.message_ms),
        row_cost=measured.row_cost,
        besides=measured.besides_ms,
    )


def _stages(num_layers: int, cuts: tuple[int, ...], rows: int, calibration: Calibration) -> StagesAtWork:
    return calibration.at_work(len(cuts) + 1) or _from_parts(num_layers, cuts, rows, calibration)


def _from_parts(num_layers: int, cuts: tuple[int, ...], rows: int, calibration: Calibration) -> StagesAtWork:
    """A pass takes a start, a message in and a message out, and for each further row as much as for rows of one
    position.
    """
    longest = max(stage_layers(num_layers, cuts))
    # half_factor is for half of the layers; fewer stay in caches no better
    cached = 1 - (1 - calibration.half_factor) * min(1.0, 2 * (num_layers - longest) / num_layers)
    return StagesAtWork(
        layer_ms=calibration.layer_ms * calibration.contention * cached,
        exit_head_ms=calibration.exit_head_ms,
        besides_ms=calibration.pass_ms + 2 * calibration.message_ms,
        row_cost=(calibration.width(rows) - 1) / (rows - 1) if rows > 1 else 0.0,
    )
