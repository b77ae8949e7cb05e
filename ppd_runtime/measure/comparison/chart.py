"""A comparison as a bar chart; needs the `plots` extra."""

from pathlib import Path

from ppd_runtime.files.images import new_figure, save_figure
from ppd_runtime.measure.comparison.report import ComparisonReport


def draw_bars(report: ComparisonReport, path: Path) -> None:
    """Draw a bar for each row's speed-up over ordinary decoding, with quartiles, and a mark for what is allowed.

    Raises:
        ValueError: where matplotlib is not installed, or the file cannot be written.
    """
    rows = report.overall
    figure = new_figure(8, 1.5 + 0.35 * len(rows))
    axes, places = figure.subplots(), range(len(rows))
    spreads = [figures.speedup for figures in rows.values()]
    reach = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.barh(places, [s.median for s in spreads], xerr=reach, color="tab:blue", ecolor="0.3", capsize=2)
    allowed = [(place, f.allowed_speedup) for place, f in enumerate(rows.values()) if f.allowed_speedup is not None]
    if allowed:
        marks, values = zip(*allowed, strict=True)
        axes.plot(values, marks, "D", color="tab:orange", label="allowed behind the first token")
        axes.legend(loc="lower right", fontsize="small")
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_yticks(places, list(rows), size="small")
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over ordinary decoding,\nmedian and quartiles of the texts")
    code = "compiled" if report.conditions.compile else "not compiled"
    axes.set_title(f"{report.conditions.model}, {report.conditions.num_prompts} prompts, {code}", size="medium")
    save_figure(figure, path, dpi=150)
