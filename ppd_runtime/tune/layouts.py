"""The layouts that fit this machine, and what each took on real texts, in turn with ordinary decoding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.trained.kept_heads import DRAFTER
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.settings.config import without_earlier_texts
from ppd_runtime.tune.compare import Pair
from ppd_runtime.tune.figures import figures, saving_share
from ppd_runtime.tune.rows import BASELINE
from ppd_runtime.tune.subject import Subject
from ppd_runtime.tune.ways import SHARED_SETTINGS, Generator, beside_ordinary

_CANDIDATES = (1, 3)
_STAGES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Layout:
    """A way to run the model."""

    name: str
    settings: dict[str, Any]
    """Its own settings of `RuntimeConfig`, by the names of `ppd generate`'s options; `threads` alone are ordinary
    decoding's."""
    processes: int = 1

    @property
    def command(self) -> str:
        """The options that ask `ppd generate` for it."""
        method = "" if self.settings.keys() & {"k", "stages"} else "--method autoregressive "
        return method + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings.items())


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
        return saving_share(self.speedup, self.allowed_speedup)

    def as_dict(self) -> dict[str, Any]:
        """The figures' JSON form."""
        layout = {"name": self.layout.name, "settings": self.layout.settings, "processes": self.layout.processes}
        figures = {name: value for name, value in vars(self).items() if name not in ("layout", "cpu_share")}
        return {**layout, **figures, "realised_saving": self.realised_saving}


def fitting(devices: int, num_layers: int, threads: int, on_cpu: bool) -> list[Layout]:
    """The layouts for which there is a device for each process: a GPU, or `threads` CPU cores.

    On CPUs ordinary decoding can have the cores of several processes instead, which come first: doubled, up to all.
    """
    doubled = takewhile(lambda number: number < devices, (2**power for power in count(1)))
    shares = [*doubled, devices] if on_cpu and devices > 1 else []
    layouts = [Layout(f"{share * threads} threads", {"threads": share * threads}) for share in shares]
    if num_layers < 2:
        return layouts
    layouts += [Layout("one stage", {"stages": 1, "threads": threads})]
    layouts += [Layout(f"k={k}", {"k": k}, k + 1) for k in _CANDIDATES if k + 1 <= devices]
    return layouts + [Layout(f"{n} stages", {"stages": n}, n) for n in _STAGES if n <= min(devices, num_layers)]


def with_best_threads(layout: Layout, rows: Sequence["LayoutFigures"]) -> Layout:
    """One stage with the threads that ordinary decoding is the fastest with; other layouts as they are."""
    if layout.settings.get("stages") != 1:
        return layout
    best = max((row for row in rows if row.speedup > 1), key=lambda row: row.speedup, default=None)
    threads = best.layout.settings["threads"] if best else layout.settings["threads"]
    name = "one stage" if threads == 1 else f"one stage, {threads} threads"
    return Layout(name, {"stages": 1, "threads": threads})


def with_parts(layout: Layout, parts: str | None) -> Layout:
    """Stages with the heads and the drafter in a folder of `ppd adapt`; any layout without one."""
    if parts is None or "stages" not in layout.settings:
        return layout
    heads = {"exit_head": parts} if layout.processes > 1 else {}
    return replace(layout, settings={**layout.settings, **heads, "drafter": str(Path(parts, DRAFTER))})


@contextmanager
def opened(layout: Layout, ordinary: OrdinaryDecoding, **others: Any) -> Iterator[Generator]:
    """The layout at work, with the model, number format, device and code of `ordinary`, and other settings."""
    config = ordinary.config
    shared = {name: getattr(config, name) for name in SHARED_SETTINGS} | {"dtype": ordinary.dtype}
    own = without_earlier_texts(layout.settings)
    threads = own.pop("threads", config.threads_per_worker)
    if own:
        with PPDRuntime(**shared, threads_per_worker=threads, **own, **others) as runtime:
            yield runtime
    else:
        with OrdinaryDecoding(**shared, threads=threads) as way:
            yield way


def measured(layout: Layout, generator: Generator, subject: Subject, seconds: float) -> LayoutFigures:
    """Run an open layout for some seconds in turn with ordinary decoding."""
    ordinary = subject.ordinary
    found = beside_ordinary(layout.name, generator, ordinary, subject.prompts, subject.params, seconds=seconds)
    on_cpu = ordinary.stage.device.type == "cpu"
    return layout_figures(layout, found.pairs(layout.name, BASELINE), found.cpu_share if on_cpu else None)


def layout_figures(layout: Layout, pairs: Sequence[Pair], cpu_share: float | None = None) -> LayoutFigures:
    """The figures of one pair at least, of texts with two tokens or more."""
    found = figures(pairs)
    if found.step_speedup is None or found.ms_per_token is None or found.ordinary_ms_per_token is None:
        raise ValueError("every text ended with its first token: give other prompts")
    return LayoutFigures(
        layout=layout,
        texts=found.texts,
        tokens=found.new_tokens,
        ms_per_token=found.ms_per_token,
        ordinary_ms_per_token=found.ordinary_ms_per_token,
        speedup=found.step_speedup.median,
        speedup_low=found.step_speedup.low,
        speedup_high=found.step_speedup.high,
        allowed_speedup=found.allowed_speedup,
        identical=found.equal_texts == 1,
        cpu_share=cpu_share,
    )


HEADS = ("", "ms/token", "speed-up", "allowed", "realised", "equal")


def layout_rows(rows: Sequence[LayoutFigures]) -> list[list[object]]:
    """The table's rows under `HEADS`; ordinary decoding comes first."""
    if not rows:
        return []
    ordinary = sorted(row.ordinary_ms_per_token for row in rows)[len(rows) // 2]
    cells: list[list[object]] = [["ordinary decoding", ordinary, "1.00", "", "", ""]]
    for row in rows:
        allowed, saving = row.allowed_speedup, row.realised_saving
        cells.append(
            [
                row.layout.name,
                row.ms_per_token,
                f"{row.speedup:.2f} ({row.speedup_low:.2f}–{row.speedup_high:.2f})",
                "" if allowed is None else f"{allowed:.2f}",
                "" if saving is None else "none" if saving <= 0 else f"{saving:.0%}",
                row.identical,
            ]
        )
    return cells
