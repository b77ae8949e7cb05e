"""A plan from what is given and, where something is missing, from what is measured here.

Only measuring needs the model and torch: they are imported when it comes to that.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppd_runtime.checks import check_cuts, check_number, check_whole
from ppd_runtime.config import in_process_config
from ppd_runtime.cost_model.machine_costs import Calibration, read_calibration
from ppd_runtime.cost_model.memory import GivenMemory
from ppd_runtime.cost_model.planner import rank
from ppd_runtime.cost_model.plans import Ranking, StagedPlan
from ppd_runtime.cost_model.tradeoff import MatchRates, read_match_rates, select
from ppd_runtime.host import available_cores
from ppd_runtime.launch.layout_choice import StageCosts, chosen_rows
from ppd_runtime.measure.machine_load import busy_note
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ppd_runtime.calibration.plan_inputs import Measurement
    from ppd_runtime.launch.supervisor import Progress

_USUAL_KS, _MOST_KS = 5, 8


@dataclass(frozen=True)
class Given:
    """What need not be measured."""

    match_rates: Path | None
    calibration: Path | None
    num_layers: int | None
    ks: Sequence[int] | None
    """Numbers of candidates to plan with; None is all that there are rates for, or that fit."""
    times_ms: Mapping[str, float | None]
    """Times that take the place of measured ones, by their name in a `Calibration`; None gives none."""
    workers: Sequence[int] | None = None
    """Numbers of workers to plan with; None is all that fit."""
    widths: Mapping[int, float] = field(default_factory=dict)
    """Passes over several candidates, in passes over one, in place of measured ones; see `Calibration.widths`."""
    run_ahead: bool = True
    """Whether a lone sub-process runs ahead where it can, as the runtime's does by default."""
    rows: Sequence[int] | None = None
    """Rows of a stage's pass to plan with; None is what a runtime chooses, or one."""
    all_reduce_ms: float | None = None
    """Tensor parallelism's all-reduce; None ranks it where it was measured."""
    memory: GivenMemory = field(default_factory=GivenMemory)
    """Of a device, and what the model takes of it, in place of what was measured."""

    def __post_init__(self) -> None:
        for k in self.ks or ():
            check_whole("k", k, 1)
        for count in self.workers or ():
            check_whole("workers", count, 1)
        for count in self.rows or ():
            check_whole("rows", count, 1)
        for name, time in self.times_ms.items():
            if time is not None:
                check_number(name, time)
        if self.times_ms.get("layer_ms") == 0:
            raise ValueError("layer_ms=0: a plan needs layers that take time; give a number above 0")
        if self.num_layers is not None:
            check_whole("num_layers", self.num_layers, 2)

    @property
    def all_times(self) -> bool:
        """Whether nothing is left to calibrate."""
        return self.calibration is not None or None not in self.times_ms.values()

    def shares(self, ks: Iterable[int], max_devices: int) -> list[int]:
        """How many candidates, 2 or more, a worker may have in what there is to plan with."""
        fitting = [(k, min(k, max_devices - 1)) for k in ks]
        layouts = [(k, w) for k, most in fitting for w in self.workers or range(1, most + 1) if w <= most]
        return sorted({math.ceil(k / count) for k, count in layouts if count < k})


@dataclass(frozen=True)
class Subject:
    """What to measure where something has to be measured; see `ppd_runtime.calibration.plan_inputs`.

    Raises:
        ValueError: for a setting that cannot work, whether anything is measured or not.
    """

    model: str
    prompts: str
    limit: int | None
    sampling: SamplingParams
    dtype: str
    device: str
    threads: int
    weights: str | None = None
    compile: bool | None = None
    generation_config: bool = True

    def __post_init__(self) -> None:
        in_process_config("a plan", {"model": self.model, **self._place})

    @property
    def _place(self) -> dict[str, Any]:
        names = ("dtype", "device", "threads", "weights", "compile", "generation_config")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def weights_name(self) -> str:
        """The format of the model's weights, or floats; none of them is read."""
        from ppd_runtime.models.checkpoint.description import describe

        return describe(self.model, self.weights).weights_name

    @cached_property
    def measurement(self) -> "Measurement":
        """The model, loaded, with its prompts."""
        from ppd_runtime.calibration.plan_inputs import Measurement

        return Measurement(self.model, self.prompts, limit=self.limit, sampling=self.sampling, **self._place)


@dataclass(frozen=True)
class Planned:
    """A ranking and what it was made from."""

    ranking: Ranking
    calibration: Calibration
    rates: MatchRates
    notes: list[str]
    """What a reader should know of how it was made."""


def plan_with(
    given: Given, max_devices: int, efficiency: float | None, subject: Subject, progress: "Progress"
) -> Planned:
    """Rank what fits within `max_devices`; `efficiency` is tensor parallelism's, see `planner.rank`.

    Raises:
        ValueError: for what was given and cannot be, before anything is measured.
    """
    known = None if given.match_rates is None else read_match_rates(given.match_rates)
    times = None if given.calibration is None else read_calibration(given.calibration)
    _check_weights(given, known, times, subject)
    if times is not None and times.compiled is False and subject.compile:
        raise ValueError(f"--compile: {given.calibration} was measured without; leave out one of the two")
    if times is None and given.all_times:
        times = Calibration(layer_ms=1.0)
    num_layers = _num_layers(known, given, subject, measures=times is None)
    rates, notes = _chosen(known, num_layers, given.ks) if known else (None, [])
    ks = given.ks or range(1, min(max(_USUAL_KS, max_devices - 1), _MOST_KS) + 1)
    shares = given.shares({k for _, k in rates.rates} if rates else ks, max_devices)
    if times is not None:
        times = _with_given(times, given)
        _check_widths(given, times, shares)
    if rates is None:
        rates = subject.measurement.match_rates(ks, progress, max_devices)
    else:
        notes.append(f"match rates from {rates.source}, which may hold texts' first tokens too")
    if times is None:
        stages = sorted({len(row) for row in rates.first_boundary.values() if len(row) <= max_devices})
        times = subject.measurement.calibrate(max_devices, max(k for _, k in rates.rates), shares, stages, progress)
        times = _with_given(times, given)
    weights = subject.weights or rates.weights or times.weights
    rates, times = replace(rates, weights=weights), replace(times, weights=weights)
    staged = _staged(num_layers, times, rates, max_devices, given, progress)
    progress("")
    ranking = rank(
        num_layers,
        times,
        rates.rates,
        max_devices,
        efficiency,
        given.workers,
        given.run_ahead,
        _devices(times, subject),
        _load_cautions(times),
        staged,
        given.all_reduce_ms,
    )
    return Planned(ranking, times, rates, notes)


def _staged(
    num_layers: int, times: Calibration, rates: MatchRates, max_devices: int, given: Given, progress: "Progress"
) -> tuple[StagedPlan, ...]:
    """The staged layout's plans; none where no first boundaries are known."""
    if not rates.first_boundary:
        return ()
    from ppd_runtime.calibration.staged_plans import rank_stages

    return rank_stages(num_layers, times, rates.first_boundary, max_devices, _rows(given, times), progress)


def _rows(given: Given, times: Calibration) -> Sequence[int]:
    """Rows of a stage's pass to plan with."""
    if given.rows:
        return given.rows
    if not times.stages and times.widths and not given.widths:
        return [1]  # their candidates have one position, which says nothing of a stage's rows
    costs = {of.row_cost for of in times.stages.values()} or {times.width(2) - 1}
    return sorted({1, *(chosen_rows(StageCosts.rounded(0.0, 0.0, cost)) for cost in costs)})


def _check_weights(given: Given, known: MatchRates | None, times: Calibration | None, subject: Subject) -> None:
    """Refuse figures that were measured with weights in another format than the model's, or than each other's."""
    files = ((given.match_rates, known and known.weights), (given.calibration, times and times.weights))
    found = [(str(path), weights) for path, weights in files if weights]
    if not found:
        return
    measures = known is None or not given.all_times
    its = subject.weights_name if measures else subject.weights
    (path, weights), *others = found
    others += [(f"model {subject.model!r}", its)] if its else []
    for other, theirs in others:
        if theirs != weights:
            raise ValueError(
                f"{path} was measured with weights in {weights}, and {other} has them in {theirs}: give figures that "
                "were measured with the same weights"
            )


def _with_given(times: Calibration, given: Given) -> Calibration:
    """A calibration with what is given in place of its own."""
    times = times.with_times(**given.times_ms)
    if given.widths:  # they are for a stage's rows, too
        rows, width = max(given.widths.items())
        cost = min((width - 1) / (rows - 1), 1.0)
        times = replace(times, stages={size: replace(of, row_cost=cost) for size, of in times.stages.items()})
    return replace(times, widths={**times.widths, **given.widths}, memory=given.memory.over(times.memory))


def _devices(times: Calibration, subject: Subject) -> int | None:
    """Devices of the machine that the times are from; without one, CPU cores here, unless the plan is for GPUs."""
    if times.devices is not None or subject.device.startswith("cuda"):
        return times.devices
    return max(1, available_cores() // max(1, subject.threads))


def _load_cautions(times: Calibration) -> list[str]:
    """Whether the times are a busy machine's."""
    note = None if times.cpu_share is None else busy_note("Measuring", times.cpu_share)
    return [note] if note else []


def _check_widths(given: Given, times: Calibration, shares: Sequence[int]) -> None:
    """Refuse fewer workers than candidates where it is not known what a pass over several candidates takes."""
    if given.workers is not None and shares and not times.widths:
        asked = ",".join(map(str, given.workers))
        way_out = f"give --width {shares[-1]}:FACTOR, or leave the times out to have it measured"
        raise ValueError(f"--workers {asked}: nothing says what a pass over {shares[-1]} candidates takes; {way_out}")


def _num_layers(known: MatchRates | None, given: Given, subject: Subject, measures: bool) -> int:
    """The model's layers; the model is only asked where it is loaded anyway."""
    if known is not None and not measures:
        return known.layers(given.num_layers)
    loaded = subject.measurement.num_layers
    for source, number in (("--layers", given.num_layers), (given.match_rates, known and known.num_layers)):
        if number not in (None, loaded):
            raise ValueError(f"{source} says {number} layers, but model {subject.model!r} has {loaded}: give its own")
    return loaded


def _chosen(known: MatchRates, num_layers: int, ks: Sequence[int] | None) -> tuple[MatchRates, list[str]]:
    """The rates to plan with, and a note on what was left out."""
    covered, left_out = known.covered(num_layers)
    rows = select(covered.rates, None, ks)
    names = ", ".join(map(str, left_out))
    notes = [f"left out exit layers {names}: Theorem 4.1 needs at least half depth"] if left_out else []
    boundaries = {(cuts, k): shares for (cuts, k), shares in covered.first_boundary.items() if not ks or k in ks}
    for cuts, _ in boundaries:
        check_cuts(num_layers, cuts)
    kept = {(exit_layer, k): rate for exit_layer, k, rate in rows}
    return replace(covered, rates=kept, first_boundary=boundaries), notes
