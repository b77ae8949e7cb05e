"""The staged layout in the planner: beside its formulas, by hand, and what the verdict says of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.cost_model import staged, theory
from ppd_runtime.cost_model.machine_costs import Calibration
from ppd_runtime.cost_model.planner import ordinary_ms, plan, rank
from ppd_runtime.cost_model.staged_planner import plan_stages, rank_stages

LAYERS_ONLY = Calibration(layer_ms=0.4)
SHARES = (0.7, 0.2, 0.05, 0.05)
BOUNDARIES = {((6,), 3): (0.9, 0.1), ((3, 6, 9), 3): SHARES, ((3, 6, 9), 1): (0.4, 0.3, 0.1, 0.2)}
RATES = {(6, 1): 0.8, (6, 3): 0.9}


def test_without_overheads_it_is_the_bound() -> None:
    row = plan_stages(12, (3, 6, 9), 3, {3: SHARES}, LAYERS_ONLY, 12 * 0.4, rows=3)
    assert row.speedup == pytest.approx(row.ideal_speedup) == pytest.approx(staged.speedup_bound(SHARES))
    assert plan_stages(12, (3, 6, 8), 3, {3: SHARES}, LAYERS_ONLY, 4.8, rows=3).ideal_speedup == pytest.approx(
        12 / (4 * 1.45)
    )
    assert (row.devices, row.cuts, row.k, row.first_boundary) == (4, (3, 6, 9), 3, SHARES)


@given(st.integers(1, 20), st.floats(0, 1), st.integers(1, 5))
def test_two_stages_are_the_papers_layout_where_nothing_else_takes_time(half: int, p: float, k: int) -> None:
    times = Calibration(layer_ms=1.0)
    row = plan_stages(2 * half, (half,), k, {k: (p, 1 - p)}, times, ordinary_ms(2 * half, times), rows=k)
    assert row.ms_per_token == pytest.approx(plan(2 * half, half, k, p, times, run_ahead=False).ms_per_token)
    assert row.compute_per_token == pytest.approx(theory.limit_compute_per_token(k, p))


def test_every_overhead_by_hand() -> None:
    times = Calibration(10, 4, 5, 3, pass_ms=2, message_ms=0.5, contention=1.2, half_factor=0.8, widths={3: 1.5})
    row = plan_stages(12, (3, 6, 9), 3, {3: SHARES}, times, 126, rows=3)
    stage = 3 * 10 * 1.2 * 0.8 * 1.5 + 3 + 2 + 2 * 0.5
    assert row.ms_per_token == pytest.approx(stage * 1.45 + 0.95 * 5 + 0.05 * 4)
    assert row.speedup == pytest.approx(126 / row.ms_per_token)
    deep = plan_stages(12, (9,), 1, {1: (0.5, 0.5)}, Calibration(10, half_factor=0.8), 120, rows=1)
    assert deep.ms_per_token == pytest.approx(9 * 10 * 0.9 * 1.5)  # a quarter fewer layers: half as much


def test_a_pass_with_less_room_names_the_same_and_takes_longer() -> None:
    known = {1: (0.4, 0.3, 0.1, 0.2), 3: SHARES}
    narrow = staged.limited_shares(known, 3, rows=1)
    # one row a pass: rank 1 at once, rank 2 (halfway from 1 to 3) a pass later, rank 3 two passes later
    assert narrow == pytest.approx((0.4, 0.7 - 0.4, 0.8 - 0.7, 0.2))
    assert staged.limited_shares(known, 3, rows=2) == pytest.approx(((0.4 + 0.7) / 2, 0.8 - 0.55, 0.9 - 0.8, 0.1))
    for rows in (3, 8):
        assert staged.limited_shares(known, 3, rows) == pytest.approx(SHARES)
    assert staged.limited_shares(known, 1, rows=1) == pytest.approx(known[1])
    assert staged.limited_shares({3: SHARES}, 3, rows=1)[0] == pytest.approx(0.7 / 3)
    rows = [plan_stages(12, (3, 6, 9), 3, known, LAYERS_ONLY, 4.8, rows=count) for count in (1, 2, 3)]
    assert [row.ms_per_token for row in rows] == sorted((row.ms_per_token for row in rows), reverse=True)
    assert rows[0].ms_per_token == pytest.approx(3 * 0.4 * staged.expected_first_boundary(narrow))
    assert rows[0].compute_per_token == pytest.approx(1 + (staged.expected_first_boundary(narrow) - 1) * 0.75)
    assert [row.first_boundary for row in rows] == [SHARES] * 3


def test_rows_are_as_many_as_pay() -> None:
    dear, cheap = (replace(LAYERS_ONLY, widths={3: width}) for width in (3.0, 1.05))
    boundaries = {cuts_k: shares for cuts_k, shares in BOUNDARIES.items() if len(shares) == 4}
    for calibration, most in ((dear, 1), (cheap, 3), (LAYERS_ONLY, 3)):
        rows = {row.k: row.rows for row in rank_stages(12, calibration, boundaries, 4, 4.8)}
        assert rows == {3: most, 1: 1}
    assert {row.rows for row in rank_stages(12, cheap, boundaries, 4, 4.8, rows=[2])} == {2}
    assert ", rows=3 on 4 devices" in rank(12, cheap, RATES, 4, boundaries=boundaries).verdict


def test_tensor_parallelism_is_ranked_by_its_all_reduces_too() -> None:
    ranking = rank(12, replace(LAYERS_ONLY, head_ms=0.2), RATES, 4, boundaries=BOUNDARIES, all_reduce_ms=0.01)
    assert [row.devices for row in ranking.parallel] == [2, 4]
    for row in ranking.parallel:
        assert row.ms_per_token == pytest.approx(4.8 / row.devices + 24 * 0.01 + 0.2)
    assert ranking.verdict.endswith("1.64 ms a token, 3.05 times (all-reduces of 0.01 ms)")
    assert ranking.footnotes == ()
    with pytest.raises(ValueError, match="both say how fast tensor parallelism is, drop one"):
        rank(12, LAYERS_ONLY, RATES, 4, efficiency=0.5, all_reduce_ms=0.01)


def test_the_ranking_is_sorted_and_fits() -> None:
    rows = rank_stages(12, LAYERS_ONLY, BOUNDARIES, 4, 4.8)
    assert [(row.devices, row.k) for row in rows] == [(4, 3), (4, 1), (2, 3)]
    assert [(row.devices, row.k) for row in rank_stages(12, LAYERS_ONLY, BOUNDARIES, 3, 4.8)] == [(2, 3)]
    assert rank_stages(12, LAYERS_ONLY, BOUNDARIES, 1, 4.8) == ()
    with pytest.raises(ValueError, match="cuts='3,6,9': with 8 layers"):
        rank_stages(8, LAYERS_ONLY, BOUNDARIES, 4, 4.8)


def test_stages_are_advised_where_they_are_the_fastest() -> None:
    ranking = rank(12, LAYERS_ONLY, RATES, 4, boundaries=BOUNDARIES)
    best, paper = ranking.staged[0], ranking.plans[0]
    assert ranking.gains
    assert ranking.verdict == (
        f"4 stages (cut after layers 3, 6 and 9) with k=3, rows=3 on 4 devices: {best.ms_per_token:.3g} ms a token, "
        f"{best.speedup:.2f} times ordinary decoding's speed; the paper's layout reaches {paper.speedup:.2f} times "
        "with exit layer 6 with k=3 on 4 devices"
    )
    parallel = rank(12, replace(LAYERS_ONLY, parallel_speedups={4: 3.5}), RATES, 4, boundaries=BOUNDARIES)
    assert parallel.verdict.endswith(
        "tensor parallelism on 4 devices is faster: 1.37 ms a token, 3.50 times (measured)"
    )
    slower = rank(12, replace(LAYERS_ONLY, parallel_speedups={4: 2.0}), RATES, 4, boundaries=BOUNDARIES)
    assert "tensor parallelism" not in slower.verdict


def test_the_papers_layout_is_advised_where_it_is_faster() -> None:
    shares = {((6,), 3): (0.1, 0.9)}
    ranking = rank(12, LAYERS_ONLY, RATES, 4, boundaries=shares)
    assert ranking.verdict.startswith("exit layer 6 with k=3 on 4 devices: ")
    assert ranking.verdict.endswith(
        "; 2 stages (cut after layer 6) with k=3, rows=3 on 2 devices would reach 1.05 times"
    )


def test_neither_is_advised_where_neither_gains() -> None:
    slow = replace(LAYERS_ONLY, hop_ms=0.2)
    ranking = rank(12, slow, {(6, 3): 0.01}, 4, boundaries={((6,), 3): (0.1, 0.9)})
    assert not ranking.gains
    assert ranking.verdict.startswith("don't: the best, exit layer 6 with k=3")
    staged_best = rank(12, slow, {(6, 3): 0.01}, 2, boundaries={((6,), 3): (0.2, 0.8)})
    assert staged_best.plans == ()
    assert staged_best.verdict == (
        "don't: the best, 2 stages (cut after layer 6) with k=3, rows=3 on 2 devices, reaches 1.03 times ordinary "
        "decoding's speed, less than 1.05: its candidates allow 1.11 times at the most, and a hop takes 0.2 ms"
    )


def test_the_best_that_fits_may_be_stages() -> None:
    (caution,) = rank(12, LAYERS_ONLY, RATES, 4, devices_here=2, boundaries=BOUNDARIES).cautions
    assert "the best that fits is 2 stages (cut after layer 6) with k=3, rows=3 on 2 devices: " in caution
