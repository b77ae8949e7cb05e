"""Latency drawn against compute, as in the paper's Figures 3 and 4; needs the `plots` extra."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppd_runtime.cost_model.tradeoff import Tradeoff
from ppd_runtime.files.images import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = dict[str, list[Tradeoff]]


def draw(rows: Sequence[Tradeoff], path: Path) -> None:
    """Draw latency against compute per unit of time (Figure 3) and per token (Figure 4) into an image file.

    Raises:
        ValueError: if matplotlib is not installed, or does not know the kind of file.
    """
    figure = new_figure(11, 4.5)
    per_time, per_token = figure.subplots(1, 2, sharey=True)
    _draw_panel(per_time, rows, "compute_per_time", "compute resources in use, on average (ordinary: 1)")
    _draw_panel(per_token, rows, "compute_per_token", "compute per token (ordinary: 1)")
    per_time.set_ylabel("latency (ordinary: 1)")
    per_token.legend()
    save_figure(figure, path, dpi=150)


def _draw_panel(axes: "Axes", rows: Sequence[Tradeoff], compute: str, label: str) -> None:
    axes.plot(1, 1, "k*", label="ordinary decoding")
    for name, curve in curves(rows).items():
        points = [(getattr(row, compute), row.latency_ratio) for row in curve]
        axes.plot(*zip(*points, strict=True), "o-", label=name)
        for row, point in zip(curve, points, strict=True):
            axes.annotate(f"k={row.k}", point, textcoords="offset points", xytext=(4, 4), fontsize="small")
    axes.set_xlabel(label)
    axes.margins(0.1)
    axes.grid(alpha=0.3)


def curves(rows: Sequence[Tradeoff]) -> Curves:
    """Each curve's rows by its name, in order of k: one curve for an exit layer whose rate goes with k (as measured
    ones do), else one for each exit layer and match rate."""
    settings = {(row.exit_layer, row.k) for row in rows}
    measured = len(settings) == len(rows) and len({row.match_rate for row in rows}) > 1
    grouped: defaultdict[str, list[Tradeoff]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.k):
        name = f"exit layer {row.exit_layer}"
        grouped[name if measured else f"{name}, p = {row.match_rate:g}"].append(row)
    return dict(grouped)
