"""The layouts that fit this machine, and what each took on real texts, in turn with ordinary decoding."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ppd_runtime.cost_model.theory import realised_saving
from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.tune.comparison.figures import Pair, TextRun, method_figures
from ppd_runtime.tune.comparison.in_turn import Way, cores_of, pairs_in_turn
from ppd_runtime.tune.machine_load import LoadMeter
from ppd_runtime.tune.subject import Subject

_CANDIDATES = (1, 3)
_STAGES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Layout:
    """A way to run the model."""

    name: str
    settings: dict[str, Any]
    """Its own settings of `RuntimeConfig`, by the names of `ppd generate`'s options; `threads` are ordinary
    decoding's."""
    processes: int = 1

    @property
    def command(self) -> str:
        """The options that ask `ppd generate` for it."""
        method = "--method autoregressive " if self.processes == 1 else ""
        return method + " ".join(f"--{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class LayoutFigures:
    """What a layout took; times are for a token after the first."""

    layout: Layout
    texts: int
    tokens: int
    ms_per_token: float
    """Median of the texts."""
    ordinary_ms_per_token: float
    """Ordinary decoding's of the same texts."""
    speedup: float
    """Median of the texts' own: ordinary decoding's time over this one's."""
    speedup_low: float
    """First quartile."""
    speedup_high: float
    """Third quartile."""
    allowed_speedup: float | None
    """The speed-up that these candidates allow if only layers take time: Theorem 4.1's, or N/E[J]."""
    identical: bool
    """Whether every text is ordinary decoding's."""
    cpu_share: float | None = None
    """The share of CPU time that measuring could have; None on other devices."""

    @property
    def realised_saving(self) -> float | None:
        """The share of the allowed saving that was measured; None if none is allowed."""
        if self.allowed_speedup is None or self.allowed_speedup <= 1:
            return None
        return realised_saving(1 / self.speedup, 1 / self.allowed_speedup)

    def as_dict(self) -> dict[str, Any]:
        """The figures' JSON form."""
        names = ["texts", "tokens", "ms_per_token", "ordinary_ms_per_token", "speedup", "speedup_low", "speedup_high"]
        names += ["allowed_speedup", "realised_saving", "identical"]
        own = {"name": self.layout.name, "settings": self.layout.settings, "processes": self.layout.processes}
        return {**own, **{name: getattr(self, name) for name in names}}


def fitting(devices: int, num_layers: int, threads: int, on_cpu: bool) -> list[Layout]:
    """The layouts for which there is a device for each process.

    Args:
        devices: GPUs, or CPU cores over `threads`.
        num_layers: the model's.
        threads: CPU threads of a process.
        on_cpu: whether ordinary decoding can have the cores of a second process instead.
    """
    layouts = [Layout(f"{2 * threads} threads", {"threads": 2 * threads})] if on_cpu and devices >= 2 else []
    if num_layers < 2:
        return layouts
    layouts += [Layout(f"k={k}", {"k": k}, k + 1) for k in _CANDIDATES if k + 1 <= devices]
    return layouts + [Layout(f"{n} stages", {"stages": n}, n) for n in _STAGES if n <= min(devices, num_layers)]


@contextmanager
def opened(layout: Layout, ordinary: OrdinaryDecoding, **others: Any) -> Iterator[Way]:
    """The layout at work, with the model, number format, device and code of `ordinary`, and other settings."""
    config = ordinary.config
    names = ("model", "weights", "device", "compile", "generation_config")
    shared = {name: getattr(config, name) for name in names} | {"dtype": ordinary.dtype}
    if layout.processes == 1:
        with OrdinaryDecoding(**shared, **layout.settings) as way:
            yield way
    else:
        threads = config.threads_per_worker
        with PPDRuntime(**shared, threads_per_worker=threads, **layout.settings, **others) as runtime:
            yield runtime


def measured(layout: Layout, way: Way, subject: Subject, seconds: float) -> LayoutFigures:
    """Run an open layout for some seconds in turn with ordinary decoding."""
    ordinary = subject.ordinary
    on_cpu = ordinary.stage.device.type == "cpu"
    load = LoadMeter(cores_of(way) if on_cpu else (), ordinary.config.threads_per_worker)
    pairs = pairs_in_turn(way, ordinary, subject.prompts, subject.params, seconds, load)
    return layout_figures(layout, pairs, load.share if on_cpu else None)


def layout_figures(layout: Layout, pairs: Sequence[Pair], cpu_share: float | None = None) -> LayoutFigures:
    """The figures of one pair at least, of texts with two tokens or more."""
    found = method_figures(pairs)
    spread = found.step_speedup
    if spread is None:
        raise ValueError("every text ended with its first token: give other prompts")
    ordinary, own = ([1000 * step for run in runs if (step := run.step_s)] for runs in _sides(pairs))
    return LayoutFigures(
        layout=layout,
        texts=found.texts,
        tokens=found.new_tokens,
        ms_per_token=statistics.median(own),
        ordinary_ms_per_token=statistics.median(ordinary),
        speedup=spread.median,
        speedup_low=spread.low,
        speedup_high=spread.high,
        allowed_speedup=found.allowed_speedup,
        identical=found.equal_texts == 1,
        cpu_share=cpu_share,
    )


def _sides(pairs: Sequence[Pair]) -> tuple[list[TextRun], list[TextRun]]:
    return [pair.ordinary for pair in pairs], [pair.run for pair in pairs]
