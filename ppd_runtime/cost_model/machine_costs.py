"""What the parts of a token cost on a machine: measured by `calibrate`, given by hand, or read from a file."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ppd_runtime.checks import check_bool, check_choice, check_number, check_share, check_whole
from ppd_runtime.config import ALL_FORMATS, FLOATS
from ppd_runtime.cost_model.memory import Memory


@dataclass(frozen=True)
class StagesAtWork:
    """What stages take that decode real texts side by side, in milliseconds; in the mean of all stages.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    layer_ms: float
    """A layer's pass over one row."""
    exit_head_ms: float
    """A boundary's head, for a pass."""
    besides_ms: float
    """What a pass takes besides layers and heads, messages among it."""
    row_cost: float = 1.0
    """What a further row adds to a pass' layers, as a share of the first one's; 1: it is a pass of its own."""
    jitter: float = 0.0
    """Standard deviation of a layer's time from pass to pass, as a share of it."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_number(f"stages' {entry.name}", getattr(self, entry.name))
        if not self.layer_ms:
            raise ValueError("stages' layer_ms=0: a plan needs layers that take time; give a number above 0")
        check_share("stages' row_cost", self.row_cost)


@dataclass(frozen=True)
class Calibration:
    """Times in milliseconds; those left out cost nothing, as in Theorem 4.1.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    layer_ms: float
    """A layer's pass over one token, the other cores idle."""
    head_ms: float = 0.0
    """Final norm and head, the choice of the token and the rules that may end the text."""
    exit_head_ms: float = 0.0
    """Naming the candidates."""
    hop_ms: float = 0.0
    """A hidden state from one process to another that waits for it."""
    pass_ms: float = 0.0
    """What running a range of layers costs, however few they are."""
    message_ms: float = 0.0
    """What a message costs a process that has other work, whether it sends it or takes it in."""
    export_ms: float = 0.0
    """Copying one token's key/value entries of half the layers out of a cache."""
    import_ms: float = 0.0
    """Writing such entries into a cache."""
    contention: float = 1.0
    """Factor on a layer's time while the other processes work."""
    half_factor: float = 1.0
    """Factor on a layer's time where only half of the layers run, token after token: their weights stay in caches."""
    parallel_speedups: Mapping[int, float] = field(default_factory=dict)
    """Ordinary decoding's measured speed-up on several devices, by their number."""
    machine: str = ""
    """Where the times are from, for people."""
    widths: Mapping[int, float] = field(default_factory=dict)
    """A layer's pass over several candidates at one position, in passes over one, by their number."""
    devices: int | None = None
    """Devices of the machine that the times are from; None where unknown."""
    cpu_share: float | None = None
    """Of the CPU time that measuring could use, what it got; less than it needs where other programs computed. None
    where unknown."""
    memory: Memory | None = None
    """What the model takes and devices have; None where unknown."""
    weights: str | None = None
    """The format of the model's weights, or floats; None where unknown."""
    stages: Mapping[int, StagesAtWork] = field(default_factory=dict)
    """By number of stages with layers alike, where they were measured."""
    compiled: bool | None = None
    """Whether passes over few tokens were in compiled code; None where unknown."""

    def __post_init__(self) -> None:
        for name in time_names():
            check_number(name, getattr(self, name))
        if not self.layer_ms:
            raise ValueError("layer_ms=0: a plan needs layers that take time; give a number above 0")
        check_number("contention", self.contention, 1.0)
        check_number("half_factor", self.half_factor)
        for devices, speedup in self.parallel_speedups.items():
            check_whole("devices", devices, 2)
            check_number(f"speed-up on {devices} devices", speedup)
            if not speedup:
                raise ValueError(f"speed-up on {devices} devices=0: give a number above 0")
        for candidates, width in self.widths.items():
            check_whole("candidates", candidates, 2)
            check_number(f"width of {candidates} candidates", width, 1.0)
        for size in self.stages:
            check_whole("stages", size, 2)
        if self.devices is not None:
            check_whole("devices", self.devices, 1)
        if self.cpu_share is not None:
            check_share("cpu_share", self.cpu_share)
        if self.compiled is not None:
            check_bool("compiled", self.compiled)
        if self.weights is not None:
            check_choice("weights", self.weights, (FLOATS, *ALL_FORMATS))

    def width(self, candidates: int) -> float:
        """A pass over so many candidates, in passes over one: linear between and behind the known ones, never below 1.

        Where none is known it is 1, as where memory traffic is all that counts.
        """
        pieces = list(itertools.pairwise(sorted({1: 1.0, **self.widths}.items())))
        if not pieces:
            return 1.0
        (low, from_width), (high, to_width) = next((p for p in pieces if p[1][0] >= candidates), pieces[-1])
        return max(1.0, from_width + (to_width - from_width) * (candidates - low) / (high - low))

    def with_times(self, **given: float | None) -> "Calibration":
        """The same with the times that are given in place of its own; None leaves one as it is.

        What was measured of stages at work follows: its layers as the layers do, its heads are the one that is given.
        """
        times: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        slower = times.get("layer_ms", self.layer_ms) / self.layer_ms
        heads = {"exit_head_ms": times["exit_head_ms"]} if "exit_head_ms" in times else {}
        stages = {n: replace(of, layer_ms=of.layer_ms * slower, **heads) for n, of in self.stages.items()}
        return replace(self, stages=stages, **times)

    def at_work(self, stages: int) -> StagesAtWork | None:
        """What so many stages take, or as many of them as were measured; None where none were."""
        known = [size for size in self.stages if size <= stages]
        return self.stages[max(known)] if known else None


def time_names() -> list[str]:
    """The times of a calibration, by name."""
    return [entry.name for entry in fields(Calibration) if entry.name.endswith("_ms")]


def read_calibration(path: Path) -> Calibration:
    """A calibration's fields in a JSON file, or under "calibration" in what `ppd plan --out` writes.

    Raises:
        ValueError: for a file that cannot be read or has another form.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        row = dict(whole.get("calibration", whole))
        for name in ("parallel_speedups", "widths"):
            row[name] = {int(n): factor for n, factor in row.get(name, {}).items()}
        row["stages"] = {int(size): StagesAtWork(**times) for size, times in row.get("stages", {}).items()}
        if row.get("memory") is not None:
            row["memory"] = Memory(**row["memory"])
        return Calibration(**row)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a calibration that `ppd plan --out` wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not a calibration; give one that `ppd plan --out` wrote") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
