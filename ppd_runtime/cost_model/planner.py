"""Times and match rates → exit layer × k ranked by predicted time per token, beside the honest alternatives.

Everything here is arithmetic: no torch, no clock. A device holds one process: the main process and W sub-processes
need W + 1, and with W < k a sub-process runs its several candidates as one pass. Times are for a token after the first,
whose pass over the prompt every way of decoding has in common.
"""

import math
from collections.abc import Mapping, Sequence

from ppd_runtime.checks import can_run_ahead, check_layers, check_number, check_share, check_whole, check_workers
from ppd_runtime.cost_model import verdict as words
from ppd_runtime.cost_model.fitting import fitting
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.plans import Alternative, Plan, Ranking, StagedPlan, TokenTime
from ppd_runtime.cost_model.run_ahead_model import entry_messages, follow
from ppd_runtime.cost_model.staged import tensor_parallel_time
from ppd_runtime.cost_model.theory import Times, miss_time
from ppd_runtime.cost_model.tradeoff import Rates


def rank(
    num_layers: int,
    calibration: Calibration,
    rates: Rates,
    max_devices: int,
    efficiency: float | None = None,
    workers: Sequence[int] | None = None,
    run_ahead: bool = True,
    devices_here: int | None = None,
    cautions: Sequence[str] = (),
    staged: Sequence[StagedPlan] = (),
    all_reduce_ms: float | None = None,
) -> Ranking:
    """Rank every (exit layer, k) of `rates` on every number of workers that fits within `max_devices`.

    `workers` holds the numbers to consider; None is 1 to k, or k alone where the calibration knows of no widths.
    `run_ahead` is the runtime's: off, every plan is Algorithm 2's.

    `efficiency` is tensor parallelism's speed-up over its number of devices, in (0, 1], whatever that is;
    `all_reduce_ms` what an all-reduce takes, of which it has two a layer. With neither, what was measured is ranked,
    and nothing where nothing was: other hardware's figures say nothing of this one's.

    `devices_here` is how many devices there are, None where unknown; plans for more are ranked, with a caution.
    `cautions` are the caller's own, for the verdict.

    What the calibration's `memory` has no room for is left out, and the verdict says so.

    `staged` are the staged layout's plans that fit within `max_devices`, the fastest first; they are ranked beside.

    Raises:
        ValueError: for rates outside [0, 1], an exit layer that Theorem 4.1 does not cover, or less than one device.
    """
    check_request(max_devices, efficiency, all_reduce_ms)
    plans = _plans(num_layers, calibration, rates, max_devices, workers, run_ahead)
    ordinary = _ordinary(num_layers, calibration)
    counts = sorted({row.devices for row in plans} | {row.devices for row in staged} | ({max_devices} - {1}))
    if all_reduce_ms is None:
        speedups = _speedups(counts, max_devices, calibration, efficiency)
    else:
        speedups = _split_speedups(counts, num_layers, calibration, all_reduce_ms)
    parallel = _parallel(ordinary, speedups)
    least = 1 + min(min(worker_counts(k, calibration, workers), default=k) for _, k in rates)
    fit = fitting(num_layers, calibration.memory, plans, staged, parallel, ordinary)
    cautions = (*words.beyond(fit.plans, fit.staged, max_devices, devices_here), *fit.left_out, *cautions)
    return Ranking(
        num_layers=num_layers,
        max_devices=max_devices,
        run_ahead=run_ahead,
        plans=tuple(fit.plans),
        ordinary=fit.ordinary,
        parallel=fit.parallel,
        gains=words.pays(fit),
        verdict=words.verdict(fit, least, max_devices, calibration, cautions),
        cautions=cautions,
        footnotes=words.footnotes(counts, parallel),
        staged=fit.staged,
    )


def _plans(
    num_layers: int,
    calibration: Calibration,
    rates: Rates,
    max_devices: int,
    workers: Sequence[int] | None,
    run_ahead: bool,
) -> list[Plan]:
    """The paper's layout in every way that fits, the fastest first."""
    plans = [
        plan(num_layers, exit_layer, k, rate, calibration, count, run_ahead)
        for (exit_layer, k), rate in rates.items()
        for count in worker_counts(k, calibration, workers)
        if count + 1 <= max_devices
    ]
    return sorted(plans, key=lambda row: (row.ms_per_token, row.devices, row.compute_per_token))


def check_request(max_devices: int, efficiency: float | None, all_reduce_ms: float | None = None) -> None:
    """Raise ValueError for less than one device, an efficiency outside (0, 1], or a negative time beside none."""
    check_whole("devices", max_devices, 1)
    if all_reduce_ms is not None:
        check_number("all_reduce_ms", all_reduce_ms)
        if efficiency is not None:
            given = f"tensor_parallel_efficiency={efficiency} with all_reduce_ms={all_reduce_ms}"
            raise ValueError(f"{given}: both say how fast tensor parallelism is, drop one")
    if efficiency is not None:
        check_share("tensor_parallel_efficiency", efficiency)
        if not efficiency:
            raise ValueError("tensor_parallel_efficiency=0: give a number above 0, at most 1")


def worker_counts(k: int, calibration: Calibration, asked: Sequence[int] | None) -> list[int]:
    """The numbers of workers to consider for k candidates."""
    if asked is not None:
        return [count for count in asked if count <= k]
    return list(range(1, k + 1)) if calibration.widths else [k]


def plan(
    num_layers: int,
    exit_layer: int,
    k: int,
    match_rate: float,
    calibration: Calibration,
    workers: int | None = None,
    run_ahead: bool = True,
) -> Plan:
    """What is predicted for one setting; without `workers` there is one for each candidate."""
    check_layers(num_layers, exit_layer)
    check_workers(k, workers)
    workers = workers or k
    runs_ahead = run_ahead and can_run_ahead(num_layers, exit_layer, k)
    compute = compute_per_token(num_layers, exit_layer, k, match_rate)
    if runs_ahead:
        time, extra = ahead_time(num_layers, match_rate, calibration)
        compute += extra
    else:
        width = calibration.width(math.ceil(k / workers))
        time = token_time(num_layers, exit_layer, workers, match_rate, calibration, width)
    saved = (num_layers - exit_layer) * match_rate
    return Plan(
        exit_layer=exit_layer,
        k=k,
        workers=workers,
        runs_ahead=runs_ahead,
        devices=workers + 1,
        match_rate=match_rate,
        time=time,
        ms_per_token=time.total,
        speedup=ordinary_ms(num_layers, calibration) / time.total,
        compute_per_token=compute,
        ideal_speedup=num_layers / (num_layers - saved),
    )


def ordinary_ms(num_layers: int, calibration: Calibration) -> float:
    """Ordinary decoding's time for a token: one pass over all layers, and the head."""
    check_whole("num_layers", num_layers, 2)
    return calibration.pass_ms + num_layers * calibration.layer_ms + calibration.head_ms


def compute_per_token(num_layers: int, exit_layer: int, k: int, match_rate: float) -> float:
    """Full passes for a token in Algorithm 2: `(d − (d − d̄)p + k(d − d̄) + k(d − d̄)(1 − p)) / d`.

    The first three terms are Theorem 4.1's for long texts; the last one is what the k sub-processes run after a miss
    for their own caches.
    """
    early = num_layers - exit_layer
    return 1 + early * (k - match_rate + k * (1 - match_rate)) / num_layers


def token_time(
    num_layers: int, exit_layer: int, workers: int, match_rate: float, calibration: Calibration, width: float = 1.0
) -> TokenTime:
    """The expected time of a token after the first in Algorithm 2, by what it is spent on.

    `width` is what a sub-process' pass over its candidates takes, in passes over one.

    A hit and a miss differ in the layers that the main process runs: d̄ and d. The d − d̄ layers behind the exit run
    beside the sub-processes' candidates, and after a miss the first d − d̄ layers run beside their catching up.
    Without overheads this is Theorem 4.1's latency for long texts; with a hop, a head and an exit head alone it is
    `theory.hit_time` and `theory.miss_time`.
    """
    check_layers(num_layers, exit_layer)
    check_whole("workers", workers, 1)
    check_share("match_rate", match_rate)
    early, between = num_layers - exit_layer, 2 * exit_layer - num_layers
    # A hit that begins at the exit layer has its hidden state sent with the token: W messages fewer.
    merged = match_rate if between == 0 else 0.0
    messages = (4 - merged) * workers
    waiting = _waiting(early, between, workers, match_rate, calibration, width)
    return _token_time(num_layers, exit_layer, match_rate, calibration, messages, waiting)


def ahead_time(num_layers: int, match_rate: float, calibration: Calibration) -> tuple[TokenTime, float]:
    """The expected time of a token after the first where the only sub-process runs ahead, by what it is spent on.

    And the full passes that this takes beyond Algorithm 2's: for candidates behind wrong ones, and for what comes too
    late. A token takes three messages, two more for a candidate behind a wrong one, and entries go out in batches.

    Within 1 % of the simulated machines while a hop is shorter than d/2 layers, but it knows no pauses. Nor does
    it know jitter: where the exit head and the final one take nearly as long, an instant decides whether a useless pass
    has begun.
    """
    exit_layer = num_layers // 2
    found = follow(exit_layer, match_rate, calibration)
    messages = 3 + 2 * found.strays + entry_messages(match_rate)
    extra = exit_layer * (found.strays + found.recomputed) / num_layers
    return _token_time(num_layers, exit_layer, match_rate, calibration, messages, found.waiting), extra


def _token_time(
    num_layers: int, exit_layer: int, match_rate: float, times: Calibration, messages: float, waiting: float
) -> TokenTime:
    """A token's time with so many messages and so long a wait; what else there is, every way has in common."""
    early = num_layers - exit_layer
    # Hits run the last d̄ layers only, which half_factor knows for d̄ = d/2.
    hit_layers = exit_layer * (1 - (1 - times.half_factor) * 2 * early / num_layers)
    one_pass = match_rate if 2 * exit_layer == num_layers else 0.0  # a hit that begins at the exit layer
    return TokenTime(
        layers=(match_rate * hit_layers + (1 - match_rate) * num_layers) * times.layer_ms,
        head=times.head_ms,
        contention=early * (2 - match_rate) * times.layer_ms * (times.contention - 1),
        passes=(2 - one_pass) * times.pass_ms,
        messages=messages * times.message_ms,
        entries=match_rate * (1 - match_rate) * times.import_ms,
        waiting=waiting,
    )


def _waiting(early: int, between: int, workers: int, match_rate: float, times: Calibration, width: float) -> float:
    """What the main process waits for early starts that are right: two hops and the exit head beside its own head.

    At half depth, `merged` of the hits follow another hit: the winner's entries leave between the exit head and the
    candidate's layers, and other sub-processes need them before those. A start that comes later than the main process
    would take for its `early` layers is a miss, and costs those.

    A pass over several candidates takes longer than the main process' `early` layers. After a miss it ends late too;
    what the layers between do not make up for, the next one begins late, by so much more for each miss: (1 − p) / p of
    them before a hit.
    """
    most = early * times.layer_ms * times.contention
    wider = (width - 1) * most
    meanwhile = times.head_ms + 2 * workers * times.message_ms
    start = times.exit_head_ms + times.message_ms
    shipping = times.export_ms + times.message_ms
    after_hit = start + shipping if workers == 1 else max(start + shipping, times.hop_ms + shipping)
    waits = (min(most, max(0.0, 2 * times.hop_ms + work + wider - meanwhile)) for work in (start, after_hit))
    alone, following = waits
    merged = match_rate if between == 0 else 0.0
    late = max(0.0, wider - max(0.0, times.head_ms + between * times.layer_ms - times.exit_head_ms))
    waited = match_rate * ((1 - merged) * alone + merged * following) + (1 - match_rate) * late
    return min(match_rate * most, waited)


def _ordinary(num_layers: int, calibration: Calibration) -> Alternative:
    return Alternative("ordinary decoding", 1, ordinary_ms(num_layers, calibration), 1.0, 1.0, "from the layers' times")


def _speedups(
    counts: Sequence[int], max_devices: int, calibration: Calibration, efficiency: float | None
) -> dict[int, tuple[float, str]]:
    """Tensor parallelism's speed-ups by the number of devices, and where each is from."""
    if efficiency is not None:
        return {devices: (efficiency * devices, "efficiency given") for devices in counts}
    measured = sorted(calibration.parallel_speedups.items())
    return {devices: (speedup, "measured") for devices, speedup in measured if devices <= max_devices}


def _split_speedups(
    counts: Sequence[int], num_layers: int, calibration: Calibration, all_reduce_ms: float
) -> dict[int, tuple[float, str]]:
    """Tensor parallelism's by its formula."""
    times = Times(calibration.layer_ms, calibration.head_ms)
    alone = calibration.pass_ms + miss_time(num_layers, times)
    return {
        devices: (
            alone / (calibration.pass_ms + tensor_parallel_time(num_layers, devices, times, all_reduce_ms)),
            f"all-reduces of {all_reduce_ms:g} ms",
        )
        for devices in counts
    }


def _parallel(ordinary: Alternative, speedups: Mapping[int, tuple[float, str]]) -> tuple[Alternative, ...]:
    return tuple(
        Alternative("tensor parallelism", devices, ordinary.ms_per_token / speedup, speedup, 1.0, source)
        for devices, (speedup, source) in speedups.items()
    )
