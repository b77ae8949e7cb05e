"""What stages take that decode real texts on this machine's cores, from their own records.

A layer is slower there than by itself, beside the other cores' and behind a pause, and more comes between passes than
messages: `calibrate`, which times parts one by one, finds neither.
"""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from ppd_runtime.calibration.calibrate import CalibrationConditions
from ppd_runtime.checks import even_cuts
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork
from ppd_runtime.cost_model.planner import ordinary_ms
from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.measure.against_ordinary import on_core_of
from ppd_runtime.measure.machine_load import CpuTime, LoadMeter
from ppd_runtime.measure.stage_ledgers import StageLedgers, is_whole
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.runtime import PPDRuntime

_MOST_STAGES = 4
_LEAST_TEXTS, _MOST_TEXTS, _BUDGET_S = 1, 40, 8.0


class _Text(NamedTuple):
    """What a text took."""

    ledgers: StageLedgers
    row_cost: float
    """What a further row of a pass adds, as the runtime chose its rows by."""
    ordinary_ms: float
    """A token of the same text in ordinary decoding, behind it."""


def with_stages_at_work(
    times: Calibration,
    ordinary: OrdinaryDecoding,
    conditions: CalibrationConditions,
    sizes: Iterable[int],
    progress: Progress = lambda line: None,
) -> Calibration:
    """The calibration with what even stages take, for each number of them in `sizes`.

    For numbers that have no cores of their own it is as many as have, two at least; none elsewhere than on the CPU.
    Stages and ordinary decoding take turns: what counts is the ratio, which a machine that changes leaves as it is.

    Raises:
        RuntimeError: when a stage fails to start, or ends.
    """
    threads = ordinary.config.threads_per_worker
    most = min(available_cores() // threads, ordinary.info.num_layers, _MOST_STAGES)
    if ordinary.stage.device.type != "cpu" or most < 2:
        return times
    load = LoadMeter([core for cores in assign_cores(most, threads) for core in cores], threads)
    found, whole_ms = {}, ordinary_ms(ordinary.info.num_layers, times)
    for size in sorted({min(size, most) for size in sizes}):
        progress(f"measuring {size} stages at work")
        if texts := list(_texts(ordinary, conditions, size, load.computing)):
            found[size] = StagesAtWork(
                layer_ms=whole_ms * median(of.ledgers.layer_ms(of.row_cost) / of.ordinary_ms for of in texts),
                exit_head_ms=whole_ms * median(of.ledgers.exit_head_ms() / of.ordinary_ms for of in texts),
                besides_ms=whole_ms * median(of.ledgers.besides_ms() / of.ordinary_ms for of in texts),
                row_cost=median(of.row_cost for of in texts),
                jitter=median(of.ledgers.jitter() for of in texts),
            )
        load.probe()
    return replace(times, stages=found, cpu_share=min(load.share, 1.0 if times.cpu_share is None else times.cpu_share))


def _texts(
    ordinary: OrdinaryDecoding, conditions: CalibrationConditions, size: int, computing: CpuTime
) -> Iterator[_Text]:
    """One text after the other until the budget is spent, in passes of as many rows as the runtime chooses."""
    config = replace(
        ordinary.config,
        stages=size,
        cuts=even_cuts(ordinary.info.num_layers, size),
        k=conditions.k,
        repetitions=False,
        dtype=ordinary.dtype,
        device="cpu",
        launcher="processes",
        trace=True,
    )
    with PPDRuntime(config=config) as runtime:
        layout = runtime.layout
        row_cost = layout.row_cost if layout and layout.rows > 1 else 1.0  # of one row it may not be known
        began = time.perf_counter()
        for number, prompt in zip(range(_MOST_TEXTS), itertools.cycle(conditions.prompts), strict=False):
            if number >= _LEAST_TEXTS and time.perf_counter() - began > _BUDGET_S:
                break
            for _ in range(2):  # the first one is not counted: cores that rested are slower
                result = runtime.generate(prompt, conditions.sampling)
            with on_core_of(runtime), computing.running():
                expected = ordinary.generate(prompt, conditions.sampling)
            if is_whole(result):
                ledgers = StageLedgers.of([result], len(result.token_ids))
                if all(ledgers.layer_by_stage_ms.values()):  # each stage ran between the first token and the last
                    yield _Text(ledgers, row_cost, 1000 * expected.stats.time_per_token_s)
