"""Which of the planner's rows fit the memory at hand, and the line that names those that do not."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ppd_runtime.cost_model.memory import GB, Memory
from ppd_runtime.cost_model.plans import Alternative, Plan, StagedPlan

Row = TypeVar("Row", Plan, StagedPlan, Alternative)


@dataclass(frozen=True)
class Fitting:
    """Rows with what they hold, and without those that hold too much."""

    plans: list[Plan]
    staged: tuple[StagedPlan, ...]
    parallel: tuple[Alternative, ...]
    ordinary: Alternative
    """There whether it fits or not: speed-ups are over it."""
    left_out: tuple[str, ...] = ()
    """A sentence that names what was left out, where something was."""


def fitting(
    num_layers: int,
    memory: Memory | None,
    plans: Sequence[Plan],
    staged: Sequence[StagedPlan],
    parallel: Sequence[Alternative],
    ordinary: Alternative,
) -> Fitting:
    """All rows where nothing is known of memory; else those that fit, each with what its fullest device holds."""
    if memory is None:
        return Fitting(list(plans), tuple(staged), tuple(parallel), ordinary)
    ordinary = replace(ordinary, memory_gb=memory.ordinary(num_layers) / GB)
    ordinary = replace(ordinary, fits=_fits(memory, ordinary))
    of_plans = _sized(plans, lambda row: memory.paper(num_layers, row.exit_layer, row.workers))
    of_stages = _sized(staged, lambda row: memory.stages(num_layers, row.cuts))
    of_parallel = _sized(parallel, lambda row: memory.parallel(num_layers, row.devices))
    named: list[tuple[str, Plan | StagedPlan | Alternative]] = [("ordinary decoding", ordinary)]
    named += [("the paper's layout", row) for row in of_plans]
    named += [(f"{row.devices} stages", row) for row in of_stages]
    named += [(f"{row.name} on {row.devices} devices", row) for row in of_parallel]
    return Fitting(
        [row for row in of_plans if _fits(memory, row)],
        tuple(row for row in of_stages if _fits(memory, row)),
        tuple(row for row in of_parallel if _fits(memory, row)),
        ordinary,
        _left_out(memory, [(name, row.memory_gb or 0.0) for name, row in named if not _fits(memory, row)]),
    )


def _sized(rows: Iterable[Row], held: Callable[[Row], float]) -> list[Row]:
    return [replace(row, memory_gb=held(row) / GB) for row in rows]


def _fits(memory: Memory, row: Plan | StagedPlan | Alternative) -> bool:
    return memory.device is None or (row.memory_gb or 0.0) * GB <= memory.device


def _left_out(memory: Memory, named: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """One sentence; of rows with the same name, what the smallest needs."""
    if not named or memory.device is None:
        return ()
    least = {name: min(needed for other, needed in named if other == name) for name, _ in named}
    rows = ", ".join(f"{name} ({needed:.3g} GB)" for name, needed in least.items())
    whose = "the cores share" if memory.shared else "a device has"
    return (f"Too little memory, for {whose} {memory.device / GB:.3g} GB: {rows}.",)
