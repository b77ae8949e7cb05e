"""A plan for this machine: every layout that fits it, run for some seconds, ranked, with a verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ppd_runtime.config import ALL_FORMATS, SHARED
from ppd_runtime.launch.cpu_affinity import own_cores
from ppd_runtime.launch.supervisor import Progress
from ppd_runtime.tune.layouts import LayoutFigures, fitting, measured, opened
from ppd_runtime.tune.machine_load import busy_note
from ppd_runtime.tune.measured_on import machine
from ppd_runtime.tune.subject import Subject
from ppd_runtime.tune.verdict import Candidate, Verdict, verdict


@dataclass(frozen=True)
class Conditions:
    """What all layouts of a plan have in common."""

    model: str
    num_layers: int
    dtype: str
    weights: str
    """The format of the model's weights, or floats."""
    device: str
    devices: int
    """GPUs, or CPU cores over `threads`."""
    threads: int
    """CPU threads of a process."""
    compiled: bool
    prompts: int
    max_new_tokens: int
    temperature: float
    seconds: float
    """Time of each layout."""
    machine: str
    exit_head: str = SHARED
    """What names the candidates; see `RuntimeConfig`."""

    @property
    def places(self) -> str:
        """What a process runs on."""
        if self.device != "cpu":
            return "GPUs"
        return "CPU cores" if self.threads == 1 else f"times {self.threads} CPU cores"


@dataclass(frozen=True)
class Plan:
    """What was measured and what follows."""

    conditions: Conditions
    layouts: tuple[LayoutFigures, ...]
    """The fastest first."""
    left_out: dict[str, str]
    """Why a layout has no figures, by its name."""
    verdict: Verdict
    cautions: tuple[str, ...]
    """What makes the figures less certain than they look, a sentence each."""

    @property
    def title(self) -> str:
        """What was measured, in a line."""
        known = self.conditions
        few_bits = f", {known.weights} weights" * (known.weights in ALL_FORMATS)
        what = f"{known.model}{few_bits}, {known.num_layers} layers, {known.dtype}{', compiled' * known.compiled}"
        return f"{what} on {known.devices} {known.places}: {known.seconds:g} s of each layout beside ordinary decoding"

    def bars(self) -> dict[str, tuple[Any, ...]]:
        """Speed-up, its quartiles, and what is allowed, by name."""
        names = ("speedup", "speedup_low", "speedup_high", "allowed_speedup")
        return {row.layout.name: tuple(getattr(row, name) for name in names) for row in self.layouts}

    def as_dict(self) -> dict[str, Any]:
        """The plan's JSON form."""
        return {
            **asdict(self.conditions),
            "layouts": [row.as_dict() for row in self.layouts],
            "left_out": self.left_out,
            "gains": self.verdict.best is not None,
            "best": self.verdict.best,
            "verdict": self.verdict.text,
            "cautions": list(self.cautions),
        }


def plan_here(
    subject: Subject, seconds: float, exit_head: str = SHARED, progress: Progress = lambda line: None
) -> Plan:
    """Run every layout that fits this machine in turn with ordinary decoding; one that cannot start is left out.

    Every text has all its tokens: an end token would leave too few to time.
    """
    known = _conditions(subject, seconds, exit_head)
    subject = replace(subject, params=replace(subject.params, ignore_eos=True))
    rows, left_out = [], {}
    layouts = fitting(known.devices, known.num_layers, known.threads, known.device == "cpu")
    for number, layout in enumerate(layouts, start=1):
        progress(f"measuring {layout.name} beside ordinary decoding, {number} of {len(layouts)}")
        try:
            with opened(layout, subject.ordinary, launcher="processes", exit_head=exit_head) as way:
                rows.append(measured(layout, way, subject, seconds))
        except (ValueError, RuntimeError) as error:
            left_out[layout.name] = " ".join(str(error).split())
    progress("")
    return made_plan(known, rows, left_out)


def made_plan(known: Conditions, rows: Sequence[LayoutFigures], left_out: dict[str, str]) -> Plan:
    """The plan that these figures make."""
    ranked = tuple(sorted(rows, key=lambda row: -row.speedup))
    safe = [row for row in ranked if row.identical or row.layout.processes == 1]
    found = verdict([_candidate(known, row) for row in safe], _nothing_fits(known, left_out), _cost(known))
    return Plan(known, ranked, left_out, found, tuple(_cautions(ranked, left_out)))


def _conditions(subject: Subject, seconds: float, exit_head: str) -> Conditions:
    ordinary, params = subject.ordinary, subject.params
    device, threads = ordinary.stage.device.type, ordinary.config.threads_per_worker
    devices = max(1, len(own_cores()) // threads) if device == "cpu" else torch.cuda.device_count()
    return Conditions(
        model=ordinary.info.name,
        num_layers=ordinary.info.num_layers,
        dtype=ordinary.dtype,
        weights=ordinary.info.weights_name,
        device=device,
        devices=devices,
        threads=threads,
        compiled=bool(ordinary.config.compile),
        prompts=len(subject.prompts),
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature or 0.0,
        seconds=seconds,
        machine=machine(),
        exit_head=exit_head,
    )


def _candidate(known: Conditions, row: LayoutFigures) -> Candidate:
    head = f" --exit-head {known.exit_head}" * (known.exit_head != SHARED and row.layout.processes > 1)
    return Candidate(
        name=row.layout.name,
        ms_per_token=row.ms_per_token,
        speedup=row.speedup,
        allowed_speedup=row.allowed_speedup,
        surely_faster=row.speedup_low > 1,
        command=f"ppd generate --model {known.model} {row.layout.command}{head}",
    )


def _nothing_fits(known: Conditions, left_out: dict[str, str]) -> str:
    if left_out:
        return "no layout could be measured here"
    return f"a layout needs two {known.places} at least, and there is {known.devices}"


def _cost(known: Conditions) -> str:
    return f"what processes on these {known.devices} {known.places} cost each other"


def _cautions(rows: Sequence[LayoutFigures], left_out: dict[str, str]) -> list[str]:
    shares = [row.cpu_share for row in rows if row.cpu_share is not None]
    busy = busy_note("Measuring", min(shares, default=1.0))
    others = [row.layout.name for row in rows if not row.identical]
    differ = f"Some texts are not ordinary decoding's: {', '.join(others)}." if others else None
    missing = [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    return [*missing, *(note for note in (busy, differ) if note)]
