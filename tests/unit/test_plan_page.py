"""What a plan's page holds for its sliders, without a browser."""

import pytest

from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import plan, rank
from ppd_runtime.cost_model.report import page, page_data
from ppd_runtime.cost_model.tradeoff import MatchRates

TIMES = Calibration(0.4, 0.3, 0.35, 0.12, widths={2: 1.1, 8: 1.5})


def held(num_layers: int, ks: range) -> dict[str, object]:
    """The data of a page with every exit layer from half depth on, for 9 devices."""
    rates = {(layer, k): 0.4 + 0.5 * layer / num_layers for layer in range(num_layers // 2, num_layers) for k in ks}
    return page_data("m", rank(num_layers, TIMES, rates, 9), TIMES, MatchRates("a test", rates, num_layers))


@pytest.mark.parametrize("run_ahead", [True, False])
def test_points_go_from_match_rate_0_over_the_measured_one_to_1(run_ahead: bool) -> None:
    rates = {(6, 1): 0.6, (9, 3): 0.8}
    ranking = rank(12, TIMES, rates, 4, run_ahead=run_ahead)
    rows = page_data("m", ranking, TIMES, MatchRates("a test", rates, 12))["plans"]
    assert isinstance(rows, list)
    assert {len(row["points"]) for row in rows} == {17}
    for row, ranked in zip(rows, ranking.plans, strict=True):
        setting = (12, row["exit"], row["k"])
        assert (*setting[1:], row["ahead"]) == (ranked.exit_layer, ranked.k, ranked.runs_ahead)
        measured = ranked.match_rate
        rates_shown = [0, measured / 2, measured, (1 + measured) / 2, 1]
        for at, rate in zip(range(0, 17, 4), rates_shown, strict=True):
            expected = plan(*setting, rate, TIMES, row["workers"], run_ahead)
            figures = (expected.match_rate, expected.ms_per_token, expected.speedup, expected.compute_per_token)
            assert row["points"][at] == [round(figure, n) for figure, n in zip(figures, (3, 3, 2, 3), strict=True)]


@pytest.mark.parametrize(
    ("num_layers", "most", "plans", "points"), [(32, 5, 240, 17), (80, 5, 600, 13), (80, 8, 1440, 5)]
)
def test_a_large_plans_page_has_fewer_points(num_layers: int, most: int, plans: int, points: int) -> None:
    data = held(num_layers, range(1, most + 1))
    rows = data["plans"]
    assert isinstance(rows, list)
    assert (len(rows), {len(row["points"]) for row in rows}) == (plans, {points})
    assert len(page(data)) < 300_000
