"""Speed-ups as a bar chart; needs the `plots` extra."""

from collections.abc import Mapping
from pathlib import Path

from ppd_runtime.files.images import new_figure, save_figure
from ppd_runtime.tune.figures import Figures


def draw_speedups(figures: Mapping[str, Figures], title: str, path: Path) -> None:
    """Draw a bar for each way, with quartiles, and a mark for what is allowed after the first token.

    Raises:
        ValueError: if matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 1.5 + 0.35 * len(figures))
    axes, places = figure.subplots(), range(len(figures))
    low, bars, high = zip(*(of_way.speedup for of_way in figures.values()), strict=True)
    reach = [[m - q for m, q in zip(bars, low, strict=True)], [q - m for m, q in zip(bars, high, strict=True)]]
    axes.barh(places, bars, xerr=reach, color="tab:blue", ecolor="0.3", capsize=2)
    allowed = [(of_way.allowed_speedup, place) for place, of_way in enumerate(figures.values())]
    marks = [mark for mark in allowed if mark[0] is not None]
    if marks:
        axes.plot(*zip(*marks, strict=True), "D", color="tab:orange", label="allowed behind the first token")
        axes.legend(loc="lower right", fontsize="small")
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_yticks(places, list(figures), size="small")
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over ordinary decoding,\nmedian and quartiles of the texts")
    axes.set_title(title, size="medium")
    save_figure(figure, path, dpi=150)
