"""Speed-ups as a bar chart; needs the `plots` extra."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ppd_runtime.files.images import new_figure, save_figure
from ppd_runtime.tune.comparison.figures import MethodFigures


class Bar(NamedTuple):
    """A speed-up over ordinary decoding."""

    speedup: float
    low: float
    """First quartile of the texts' speed-ups; the speed-up itself if predicted."""
    high: float
    allowed: float | None


def bar_of(figures: MethodFigures) -> Bar:
    """A method's bar."""
    spread = figures.speedup
    return Bar(spread.median, spread.low, spread.high, figures.allowed_speedup)


def draw_speedups(bars: Mapping[str, Bar], title: str, path: Path) -> None:
    """Draw a bar for each name, with quartiles, and a mark for what is allowed after the first token.

    Raises:
        ValueError: if matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 1.5 + 0.35 * len(bars))
    axes, places = figure.subplots(), range(len(bars))
    reach = [[bar.speedup - bar.low for bar in bars.values()], [bar.high - bar.speedup for bar in bars.values()]]
    axes.barh(places, [bar.speedup for bar in bars.values()], xerr=reach, color="tab:blue", ecolor="0.3", capsize=2)
    allowed = [(place, bar.allowed) for place, bar in enumerate(bars.values()) if bar.allowed is not None]
    if allowed:
        marks, values = zip(*allowed, strict=True)
        axes.plot(values, marks, "D", color="tab:orange", label="allowed behind the first token")
        axes.legend(loc="lower right", fontsize="small")
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_yticks(places, list(bars), size="small")
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over ordinary decoding,\nmedian and quartiles of the texts")
    axes.set_title(title, size="medium")
    save_figure(figure, path, dpi=150)
