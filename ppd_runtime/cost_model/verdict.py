"""What a ranking says to people: the verdict with its reasons and cautions, and the footnotes."""

import math
from collections.abc import Sequence

from ppd_runtime.cost_model.fitting import Fitting
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.plans import Alternative, Plan, StagedPlan

AnyPlan = Plan | StagedPlan
WORTH_IT = 1.05
"""A speed-up below this is not worth a second device."""
_PUBLISHED = (
    "Tensor parallelism{more} was not measured and is not ranked; on A100 GPUs, gpt-fast published 1.60 times ordinary "
    "decoding's speed on 2 devices and 2.44 times on 4."
)


def pays(fit: Fitting) -> bool:
    """Whether a plan is worth its devices: it gains, or ordinary decoding does not fit one device."""
    ranked = _ranked(fit.plans, fit.staged)
    return bool(ranked) and (ranked[0].speedup >= WORTH_IT or not fit.ordinary.fits)


def verdict(fit: Fitting, least: int, max_devices: int, calibration: Calibration, cautions: Sequence[str]) -> str:
    """What to do, and why not, with every caution; `least` is the fewest devices that any plan needs."""
    ranked = _ranked(fit.plans, fit.staged)
    if fit.left_out and not ranked:
        advice = "don't: no layout fits the memory"
    elif ranked and not fit.ordinary.fits:
        advice = f"{_setting(ranked[0])}: {_speed(ranked[0])}, which does not fit one device"
    else:
        advice = _advice(fit.plans, fit.staged, least, max_devices, calibration)
    advice += _beside(ranked[0], fit.parallel) if ranked else ""
    return f"{advice}. {' '.join(cautions)}" if cautions else advice


def footnotes(counts: Sequence[int], parallel: Sequence[Alternative]) -> tuple[str, ...]:
    """What others measured on other hardware, where nothing was measured for one of these numbers of devices."""
    if not set(counts) - {row.devices for row in parallel}:
        return ()
    return (_PUBLISHED.format(more=" on other numbers of devices" if parallel else ""),)


def beyond(plans: Sequence[Plan], staged: Sequence[StagedPlan], max_devices: int, here: int | None) -> tuple[str, ...]:
    """A caution where plans may have more devices than there are, with the best of those that fit."""
    if here is None or max_devices <= here:
        return ()
    text = f"The plan may have {max_devices} devices, but there {'is' if here == 1 else 'are'} {here}"
    ranked = _ranked(plans, staged)
    if not ranked or ranked[0].devices <= here:
        return (f"{text}.",)
    fitting = next((row for row in ranked if row.devices <= here), None)
    best = f"the best that fits is {_setting(fitting)}: {_speed(fitting)}" if fitting else "no plan fits"
    return (f"{text}: the others are taken to be like {'it' if here == 1 else 'them'}; {best}.",)


def _ranked(plans: Sequence[Plan], staged: Sequence[StagedPlan]) -> list[AnyPlan]:
    rows: list[AnyPlan] = [*plans, *staged]
    return sorted(rows, key=lambda row: row.ms_per_token)


def _advice(
    plans: Sequence[Plan], staged: Sequence[StagedPlan], least: int, max_devices: int, calibration: Calibration
) -> str:
    if _ranked(plans, staged)[:1] == list(staged[:1]) != []:
        return _staged_advice(staged[0], calibration) + _papers_layout(plans)
    text = _papers_advice(plans, least, max_devices, calibration)
    return f"{text}; {_setting(staged[0])} would reach {staged[0].speedup:.2f} times" if staged else text


def _staged_advice(best: StagedPlan, calibration: Calibration) -> str:
    if best.speedup >= WORTH_IT:
        return f"{_setting(best)}: {_speed(best)}"
    text = f"don't: the best, {_setting(best)}, reaches {best.speedup:.2f} times ordinary decoding's speed, less than "
    allowed = f"its candidates allow {best.ideal_speedup:.2f} times at the most"
    return f"{text}{WORTH_IT}: {allowed}, and a hop takes {calibration.hop_ms:.3g} ms"


def _papers_layout(plans: Sequence[Plan]) -> str:
    return f"; the paper's layout reaches {plans[0].speedup:.2f} times with {_setting(plans[0])}" if plans else ""


def _papers_advice(plans: Sequence[Plan], least: int, max_devices: int, calibration: Calibration) -> str:
    if not plans:
        return f"don't: a main process and its sub-processes need at least {least} devices, the limit is {max_devices}"
    best = plans[0]
    if best.speedup >= WORTH_IT:
        return f"{_setting(best)}: {_speed(best)}"
    text = f"don't: the best, {_setting(best)}, reaches {best.speedup:.2f} times ordinary decoding's speed, "
    return f"{text}less than {WORTH_IT}: {_reason(best, calibration)}"


def _setting(row: AnyPlan) -> str:
    if isinstance(row, StagedPlan):
        fewer = f", rows={row.rows}" if row.rows > 1 else ""
        return f"{row.devices} stages (cut after {_layers(row.cuts)}) with k={row.k}{fewer} on {row.devices} devices"
    fewer = f", workers={row.workers}" if row.workers < row.k else ""
    ahead = ", running ahead" if row.runs_ahead else ""
    return f"exit layer {row.exit_layer} with k={row.k}{fewer} on {row.devices} devices{ahead}"


def _layers(cuts: Sequence[int]) -> str:
    *first, last = map(str, cuts)
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"


def _speed(row: AnyPlan) -> str:
    return f"{row.ms_per_token:.3g} ms a token, {row.speedup:.2f} times ordinary decoding's speed"


def _reason(best: Plan, calibration: Calibration) -> str:
    if best.ideal_speedup < WORTH_IT:
        return (
            f"a match rate of {best.match_rate:.2f} allows {best.ideal_speedup:.2f} times at the most, "
            "even if messages cost nothing"
        )
    time = best.time
    costs = {
        _waiting_for(best, calibration): time.waiting,
        f"sending and taking in messages ({calibration.message_ms:.3g} ms each)": time.messages,
        f"the devices slowing each other down ({calibration.contention - 1:.0%})": time.contention,
        "running the layers in two parts": time.passes - calibration.pass_ms,
        "importing key/value entries": time.entries,
    }
    what = max(costs, key=costs.__getitem__)
    return (
        f"the match rate of {best.match_rate:.2f} would allow {best.ideal_speedup:.2f} times, but {what} "
        f"costs {costs[what]:.3g} ms a token beside {calibration.layer_ms:.3g} ms a layer"
    )


def _waiting_for(best: Plan, calibration: Calibration) -> str:
    width = calibration.width(math.ceil(best.k / best.workers))
    why = f"a hop takes {calibration.hop_ms:.3g} ms"
    if width > 1:
        why += f", a pass over a worker's candidates {width:.2f} times one over one"
    what = "early starts and key/value entries" if best.runs_ahead else "early starts"
    return f"waiting for {what} ({why})"


def _beside(best: AnyPlan, parallel: Sequence[Alternative]) -> str:
    """What tensor parallelism does on the fewest devices on which it is faster."""
    faster = [row for row in parallel if row.ms_per_token < best.ms_per_token]
    if not faster:
        return ""
    first = min(faster, key=lambda row: row.devices)
    how = f"{first.ms_per_token:.3g} ms a token, {first.speedup:.2f} times ({first.source})"
    return f"; tensor parallelism on {first.devices} devices is faster: {how}"
