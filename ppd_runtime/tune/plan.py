"""A plan for this machine: every layout that fits it, run for some seconds, ranked, with a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ppd_runtime.launch.cpu_affinity import own_cores
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.settings.config import ALL_FORMATS
from ppd_runtime.tune.layouts import (
    HEADS,
    LayoutFigures,
    fitting,
    layout_rows,
    measured,
    opened,
    with_best_threads,
    with_parts,
)
from ppd_runtime.tune.machine_load import busy_note
from ppd_runtime.tune.measured_on import machine
from ppd_runtime.tune.subject import Subject
from ppd_runtime.tune.verdict import Candidate, Plan, verdict


def plan_here(
    subject: Subject,
    seconds: float,
    exit_head: str | None = None,
    drafter: str | None = None,
    progress: Progress = lambda line: None,
    parts: str | None = None,
) -> Plan:
    """Run every layout that fits this machine in turn with ordinary decoding; one that cannot start is left out.

    `exit_head` is the setting of layouts with several processes, `drafter` that of stages, `parts` a folder of
    `ppd adapt` in place of both for stages. Every text has all its tokens: an end token would leave too few to time.
    """
    known = _conditions(subject, seconds) | {"exit_head": exit_head, "drafter": drafter}
    subject = replace(subject, params=replace(subject.params, ignore_eos=True))
    rows, left_out = list[LayoutFigures](), dict[str, str]()
    layouts = fitting(known["devices"], known["num_layers"], known["threads"], known["device"] == "cpu")
    for number, fits in enumerate(layouts, start=1):
        layout = with_parts(with_best_threads(fits, rows), parts)
        progress(f"measuring {layout.name} beside ordinary decoding, {number} of {len(layouts)}")
        others: dict[str, Any] = {"launcher": "processes"} if layout.processes > 1 else {}
        if others and exit_head is not None:
            others["exit_head"] = exit_head
        if "stages" in layout.settings and drafter is not None:
            others["drafter"] = drafter
        try:
            with opened(layout, subject.ordinary, **others) as way:
                rows.append(measured(layout, way, subject, seconds))
        except (ValueError, RuntimeError) as error:
            left_out[layout.name] = " ".join(str(error).split())
    progress("")
    return made_plan(known, rows, left_out)


def made_plan(known: Mapping[str, Any], rows: Sequence[LayoutFigures], left_out: dict[str, str]) -> Plan:
    """The plan that these figures make."""
    ranked = tuple(sorted(rows, key=lambda row: -row.speedup))
    candidates = [_candidate(known, row) for row in ranked if row.identical or row.layout.processes == 1]
    devices = f"{known['devices']} {_places(known)}"
    nothing = f"a layout needs two {_places(known)} at least, and there is {known['devices']}"
    nothing = "no layout could be measured here" if left_out else nothing
    found = verdict(candidates, nothing, f"what processes on these {devices} cost each other")
    data = {**known, "layouts": [row.as_dict() for row in ranked], "left_out": left_out}
    few_bits = f", {known['weights']} weights" * (known["weights"] in ALL_FORMATS)
    what = (
        f"{known['model']}{few_bits}, {known['num_layers']} layers, {known['dtype']}{', compiled' * known['compiled']}"
    )
    title = f"{what} on {devices}: {known['seconds']:g} s of each layout beside ordinary decoding"
    share = min((row.cpu_share for row in rows if row.cpu_share is not None), default=1.0)
    return Plan(title, data, HEADS, layout_rows(ranked), found, tuple(_cautions(ranked, left_out, share)), share)


def _conditions(subject: Subject, seconds: float) -> dict[str, Any]:
    ordinary, params = subject.ordinary, subject.params
    device, threads = ordinary.stage.device.type, ordinary.config.threads_per_worker
    return {
        "model": ordinary.info.name,
        "num_layers": ordinary.info.num_layers,
        "dtype": ordinary.dtype,
        "weights": ordinary.info.weights_name,
        "device": device,
        "devices": max(1, len(own_cores()) // threads) if device == "cpu" else torch.cuda.device_count(),
        "threads": threads,
        "compiled": bool(ordinary.config.compile),
        "prompts": len(subject.prompts),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature or 0.0,
        "seconds": seconds,
        "machine": machine(),
    }


def _places(known: Mapping[str, Any]) -> str:
    """What a process runs on."""
    if known["device"] != "cpu":
        return "GPUs"
    return "CPU cores" if known["threads"] == 1 else f"times {known['threads']} CPU cores"


def _candidate(known: Mapping[str, Any], row: LayoutFigures) -> Candidate:
    several = row.layout.processes > 1
    head = f" --exit-head {known['exit_head']}" * (known["exit_head"] is not None and several)
    head += f" --drafter {known['drafter']}" * (known["drafter"] is not None and "stages" in row.layout.settings)
    return Candidate(
        name=row.layout.name,
        ms_per_token=row.ms_per_token,
        speedup=row.speedup,
        allowed_speedup=row.allowed_speedup if several else None,  # processes cost each other nothing there
        surely_faster=row.speedup_low > 1,
        command=f"ppd generate --model {known['model']} {row.layout.command}{head}",
    )


def _cautions(rows: Sequence[LayoutFigures], left_out: dict[str, str], share: float) -> list[str]:
    busy = busy_note("Measuring", share)
    others = [row.layout.name for row in rows if not row.identical]
    differ = f"Some texts are not ordinary decoding's: {', '.join(others)}." if others else None
    missing = [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    return [*missing, *(note for note in (busy, differ) if note)]
