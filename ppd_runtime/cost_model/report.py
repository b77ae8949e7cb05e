"""A plan as one HTML page that needs no network: the ranking, the match rates, the trade-off with sliders.

Every figure is computed here; the page's script looks up what its sliders are set to.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import plan
from ppd_runtime.cost_model.plans import Plan, Ranking
from ppd_runtime.cost_model.tradeoff import MatchRates, boundary_rows
from ppd_runtime.files.whole import whole_file

_STYLE, _DATA = "/*STYLE*/", "/*DATA*/null"
_STEPS = 8
"""Steps of the match rate on either side of the measured one."""
_POINTS = 8_000
"""Of all plans together, beside the measured ones, at the most; but each has one on either side. The page of 600 plans
has 260 kB."""


def plan_data(model: str, ranking: Ranking, calibration: Calibration, measured: MatchRates) -> dict[str, object]:
    """A plan as JSON holds it; `ppd plan` reads its calibration again, and its match rates."""
    return {
        "model": model,
        "weights": measured.weights,
        **asdict(ranking),
        "calibration": asdict(calibration),
        "match_rates_source": measured.source,
        "match_rates": _by_exit(measured),
        "first_boundary": boundary_rows(measured.first_boundary),
    }


def page_data(model: str, ranking: Ranking, calibration: Calibration, measured: MatchRates) -> dict[str, object]:
    """`plan_data` with what the sliders show: each plan at its own match rate, in the middle, and at others."""
    steps = max(1, min(_STEPS, _POINTS // (2 * max(1, len(ranking.plans)))))
    plans = [_setting(row, _over_match_rates(row, steps, ranking, calibration)) for row in ranking.plans]
    return {**plan_data(model, ranking, calibration, measured), "plans": plans}


def write_page(data: Mapping[str, object], path: Path) -> None:
    """Write `page_data` as a page; the file appears when it is whole."""
    with whole_file(path) as unfinished:
        unfinished.write_text(page(data), encoding="utf-8")


def page(data: Mapping[str, object]) -> str:
    """The page; no text in the data can end the script that holds them."""
    held = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, after = _shipped("report.html").replace(_STYLE, _shipped("report.css")).split(_DATA)
    return before + held + after


def _over_match_rates(row: Plan, steps: int, ranking: Ranking, calibration: Calibration) -> list[Plan]:
    """The setting from match rate 0 in `steps` equal steps to its own, and in as many to 1."""

    def at(match_rate: float) -> Plan:
        setting = (ranking.num_layers, row.exit_layer, row.k, match_rate)
        return plan(*setting, calibration, row.workers, ranking.run_ahead)

    below = [at(row.match_rate * step / steps) for step in range(steps)]
    above = [at(1 - (1 - row.match_rate) * step / steps) for step in reversed(range(steps))]
    return [*below, row, *above]


def _setting(row: Plan, points: list[Plan]) -> dict[str, object]:
    """A plan as the page's script reads it."""
    return {
        "exit": row.exit_layer,
        "k": row.k,
        "workers": row.workers,
        "devices": row.devices,
        "ahead": row.runs_ahead,
        "points": [_figures(point) for point in points],
        **({} if row.memory_gb is None else {"memory_gb": row.memory_gb}),
    }


def _figures(row: Plan) -> list[float]:
    """Match rate, ms a token, speed-up and full passes a token, with the digits that the page shows."""
    figures = ((row.match_rate, 3), (row.ms_per_token, 3), (row.speedup, 2), (row.compute_per_token, 3))
    return [round(figure, digits) for figure, digits in figures]


def _shipped(name: str) -> str:
    return (resources.files("ppd_runtime.cost_model") / name).read_text(encoding="utf-8")


def _by_exit(measured: MatchRates) -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for (exit_layer, k), rate in sorted(measured.rates.items()):
        table.setdefault(str(exit_layer), {})[str(k)] = rate
    return table
