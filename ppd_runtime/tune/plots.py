"""Match rates as heatmaps, exit layers against k and against the position in the output; needs the `plots` extra."""

from pathlib import Path
from typing import TYPE_CHECKING

from ppd_runtime.files.images import new_figure, save_figure
from ppd_runtime.tune.match_rate_report import MatchRateReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = {"logits": "by logits", "shared_noise": "by logits and shared noise"}


def draw_heatmaps(report: MatchRateReport, path: Path) -> None:
    """Draw exit layer against k for each ranking, and against position for the runtime's ranking and middle k.

    Raises:
        ValueError: if matplotlib is not installed, or the file cannot be written.
    """
    setting, ranking = report.setting, report.setting.rankings[0]
    k = report.middle_k
    widths = [3.5] * len(setting.rankings) + [5.5]
    figure = new_figure(1 + sum(widths), 2 + 0.3 * len(setting.exit_layers))
    *by_k, by_position = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    for axes, name in zip(by_k, setting.rankings, strict=True):
        rates = report.overall[name]
        rows = [[rates.rate(layer, some_k) for some_k in setting.ks] for layer in setting.exit_layers]
        _heatmap(axes, rows, list(map(str, setting.ks)), "k", _TITLES[name])
    ranges = report.by_position[ranking]
    rows = [[rates.rate(layer, k) for rates in ranges.values()] for layer in setting.exit_layers]
    _heatmap(by_position, rows, [f"{a}–{b}" for a, b in ranges], "position in the output", f"k = {k}")
    by_k[0].set_yticks(range(len(setting.exit_layers)), list(map(str, setting.exit_layers)))
    by_k[0].set_ylabel("exit layer")
    figure.suptitle(f"match rates of {report.model}, {report.runtime_rates.comparisons} tokens")
    save_figure(figure, path, dpi=150)


def _heatmap(axes: "Axes", rows: list[list[float]], labels: list[str], what: str, title: str) -> None:
    axes.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
    for y, row in enumerate(rows):
        for x, rate in enumerate(row):
            axes.text(x, y, f"{rate:.2f}", ha="center", va="center", size=7, color="black" if rate > 0.6 else "white")
    axes.set_xticks(range(len(labels)), labels, size="small")
    axes.set_xlabel(what)
    axes.set_title(title, size="medium")
