"""A plan as one HTML page that needs no network: the ranking, the match rates, the trade-off with sliders."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import Ranking
from ppd_runtime.cost_model.tradeoff import MatchRates
from ppd_runtime.files.whole import whole_file

_STYLE, _DATA = "/*STYLE*/", "/*DATA*/null"


def plan_data(model: str, ranking: Ranking, calibration: Calibration, measured: MatchRates) -> dict[str, object]:
    """A plan as JSON holds it; `ppd plan` reads its calibration again, and its match rates."""
    return {
        "model": model,
        **asdict(ranking),
        "calibration": asdict(calibration),
        "match_rates_source": measured.source,
        "match_rates": _by_exit(measured),
    }


def write_page(data: Mapping[str, object], path: Path) -> None:
    """Write `plan_data` as a page; the file appears when it is whole."""
    with whole_file(path) as unfinished:
        unfinished.write_text(page(data), encoding="utf-8")


def page(data: Mapping[str, object]) -> str:
    """The page; no text in the data can end the script that holds them."""
    held = json.dumps(data).replace("<", "\\u003c")
    before, after = _shipped("report.html").replace(_STYLE, _shipped("report.css")).split(_DATA)
    return before + held + after


def _shipped(name: str) -> str:
    return (resources.files("ppd_runtime.cost_model") / name).read_text(encoding="utf-8")


def _by_exit(measured: MatchRates) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for (exit_layer, k), rate in sorted(measured.rates.items()):
        table.setdefault(str(exit_layer), {})[str(k)] = rate
    return table
