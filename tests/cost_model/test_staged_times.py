"""The staged layout's machines on virtual clocks, over texts whose first boundaries are drawn."""

import statistics

import pytest
from virtual_stages import SimulatedText, StagedSetting, StageTimes, simulate_staged_runs

from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.theory import Times

SHARES = (0.7, 0.15, 0.1, 0.05)
CUTS = (3, 6, 9)


def simulated(setting, shares, runs=2):
    found = simulate_staged_runs(setting, shares, runs)
    return SimulatedText(
        time=statistics.fmean(run.time for run in found),
        time_per_token=statistics.fmean(run.time for run in found) / setting.num_new_tokens,
        first_boundary=tuple(map(statistics.fmean, zip(*(run.first_boundary for run in found), strict=True))),
        rows_per_token=statistics.fmean(run.rows_per_token for run in found),
    )


def test_one_candidate_at_a_time_takes_what_the_formula_says():
    setting = StagedSetting(12, CUTS, k=1, rows=1, num_new_tokens=60)
    found = simulated(setting, SHARES)
    shares = [count / 59 for count in found.first_boundary]
    assert found.time == pytest.approx(staged.expected_time(12, CUTS, shares, 60, Times()), rel=0.02)


def test_what_nobody_names_takes_ordinary_decodings_time():
    found = simulated(StagedSetting(12, CUTS, k=3, rows=8, num_new_tokens=20), (0, 0, 0, 1), runs=1)
    assert found.time == 12 * 20
    assert found.first_boundary == (0, 0, 0, 19)


def test_room_for_more_rows_is_faster_where_rows_cost_nothing_and_left_empty_where_they_cost_passes():
    few, many, dear = (
        simulated(StagedSetting(12, CUTS, 3, rows, 40, StageTimes(row_cost=cost)), SHARES)
        for rows, cost in ((1, 0.0), (8, 0.0), (8, 1.0))
    )
    assert many.time_per_token < 0.85 * few.time_per_token
    assert many.rows_per_token > few.rows_per_token
    assert (dear.time_per_token, dear.rows_per_token) == (few.time_per_token, few.rows_per_token)


@pytest.mark.parametrize(
    "slower",
    [
        {"slow": {2: 2.0}},
        {"slow_links": {0: 8.0}},
        {"times": StageTimes(hop=2.0)},
        {"times": StageTimes(hop=0.25, besides=1)},
        {"jitter": 0.5},
    ],
)
def test_what_slows_a_stage_down_slows_the_text_down(slower):
    times = {"times": StageTimes(hop=0.25)}
    even, uneven = (simulated(StagedSetting(12, CUTS, 3, 8, 40, **(times | more)), SHARES) for more in ({}, slower))
    assert uneven.time_per_token > 1.1 * even.time_per_token
    assert uneven.first_boundary == pytest.approx(even.first_boundary, abs=10)
