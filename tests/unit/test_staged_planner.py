"""The staged layout in the planner: by hand, beside the formulas, and what the verdict says of it."""

from dataclasses import replace

import pytest

from ppd_runtime.calibration.planning import Given, _rows
from ppd_runtime.calibration.simulated_stages import StageTimes
from ppd_runtime.calibration.staged_plans import _ranks, plan_stages, rank_stages, stage_times
from ppd_runtime.cost_model import staged
from ppd_runtime.cost_model.machine_costs import Calibration, StagesAtWork
from ppd_runtime.cost_model.planner import plan, rank

LAYERS_ONLY = Calibration(layer_ms=0.4)
SHARES = (0.7, 0.2, 0.05, 0.05)
BOUNDARIES = {((6,), 3): (0.9, 0.1), ((3, 6, 9), 3): SHARES, ((3, 6, 9), 1): (0.4, 0.3, 0.1, 0.2)}
RATES = {(6, 1): 0.8, (6, 3): 0.9}
STAGED = rank_stages(12, LAYERS_ONLY, BOUNDARIES, 4, (1, 8))


def ranked(times, boundaries, devices=4, rows=(1, 8)):
    return rank_stages(12, times, boundaries, devices, rows)


@pytest.mark.parametrize("boundary", [1, 2, 3, 4])
def test_without_overheads_a_token_costs_the_stages_up_to_its_boundary(boundary: int) -> None:
    shares = tuple(float(other == boundary) for other in (1, 2, 3, 4))
    row = plan_stages(12, (3, 6, 9), 1, shares, LAYERS_ONLY, rows=8)
    assert row.ms_per_token == pytest.approx(3 * 0.4 * boundary)
    assert row.speedup == pytest.approx(row.ideal_speedup) == pytest.approx(staged.speedup_bound(shares))
    assert plan_stages(12, (3, 6, 8), 3, shares, LAYERS_ONLY, rows=8).ideal_speedup == pytest.approx(
        12 / (4 * boundary)
    )
    assert (row.devices, row.cuts, row.k, row.rows, row.first_boundary) == (4, (3, 6, 9), 1, 8, shares)


def test_two_stages_are_the_papers_layout_where_nothing_else_takes_time() -> None:
    papers = plan(12, 6, 1, 0.7, LAYERS_ONLY, run_ahead=False)
    row = plan_stages(12, (6,), 1, (0.7, 0.3), LAYERS_ONLY, rows=1)
    assert row.ms_per_token == pytest.approx(papers.ms_per_token, rel=0.06)  # texts are drawn
    assert row.compute_per_token == pytest.approx(papers.compute_per_token, rel=0.2)


def test_every_overhead_by_hand() -> None:
    times = Calibration(10, 4, 5, 4, pass_ms=2, message_ms=0.5, contention=1.2, half_factor=0.8, widths={3: 1.5})
    found = stage_times(12, (3, 6, 9), 3, times)
    assert found == StageTimes(pytest.approx(10 * 1.2 * 0.8), 4, 5, 4 - 2 * 0.5, row_cost=0.25, besides=2 + 2 * 0.5)
    assert stage_times(12, (9,), 1, Calibration(10, half_factor=0.8)).layer == pytest.approx(9)  # a quarter fewer: half
    late = plan_stages(12, (3, 6, 9), 1, (0.0, 0.0, 0.0, 1.0), times, rows=1)
    a_pass = 3 * found.layer + found.besides
    least = 4 * a_pass + 4 * 3 + 4
    assert (
        least <= late.ms_per_token < 1.04 * least
    )  # a token may wait for the end of a useless pass, or of a head's guess
    assert late.speedup == pytest.approx((2 + 12 * 10 + 4) / late.ms_per_token)


def test_stages_that_were_measured_at_work_by_hand() -> None:
    measured = {2: StagesAtWork(11, 6, 1, 0.2), 4: StagesAtWork(13, 7, 2)}
    times = Calibration(10, 4, 5, 3, pass_ms=2, contention=1.2, half_factor=0.8, widths={3: 1.5}, stages=measured)
    assert stage_times(12, (6,), 3, times) == StageTimes(11, 4, 6, 3, row_cost=0.2, besides=1)
    assert stage_times(12, (4, 8), 1, times) == stage_times(12, (6,), 1, times), "as two: three were not measured"
    for cuts in ((3, 6, 9), (2, 4, 6, 8, 10)):
        assert stage_times(12, cuts, 1, times) == StageTimes(13, 4, 7, 3, row_cost=1.0, besides=2)
    for given, changed in (
        ({"hop_ms": 9}, {"hop": 9}),
        ({"layer_ms": 20}, {"layer": 22}),
        ({"exit_head_ms": 8}, {"exit_head": 8}),
        ({"head_ms": 3, "exit_head_ms": None}, {"head": 3}),
    ):
        known = StageTimes(11, 4, 6, 3, row_cost=0.2, besides=1)
        assert stage_times(12, (6,), 1, times.with_times(**given)) == replace(known, **changed)


def test_stages_that_are_not_regular_wait_for_each_other() -> None:
    """A quarter of a pass of six layers, of which a layer has its share by itself."""
    regular, jittery = (
        Calibration(10, 4, stages={2: StagesAtWork(11, 4, 1, jitter=jitter)}) for jitter in (0.0, 0.25 * 6**0.5)
    )
    even, uneven = (plan_stages(12, (6,), 1, (1.0, 0.0), times, rows=1).ms_per_token for times in (regular, jittery))
    assert even == pytest.approx(6 * 11 + 4 + 1, rel=1e-3)
    assert 1.05 * even < uneven < 1.25 * even


def test_rows_are_as_many_as_pay() -> None:
    dear, cheap = (replace(LAYERS_ONLY, widths={3: width}) for width in (3.0, 1.05))
    for calibration, most in ((dear, 1), (cheap, 8), (LAYERS_ONLY, 8)):
        assert {row.rows for row in ranked(calibration, BOUNDARIES) if row.k == 3} == {most}
    assert {row.rows for row in ranked(cheap, BOUNDARIES, rows=[2])} == {2}
    assert ", rows=8 on 4 devices" in rank(12, cheap, RATES, 4, staged=ranked(cheap, BOUNDARIES)).verdict


def test_rows_that_are_not_given_are_those_of_a_runtime() -> None:
    def chosen(times: Calibration, **given: object) -> list[int]:
        return list(_rows(Given(None, None, 12, None, {}, **given), times))

    measured, cheap = replace(LAYERS_ONLY, widths={3: 1.1}), replace(LAYERS_ONLY, widths={2: 1.25})
    assert chosen(LAYERS_ONLY) == [1, 8]
    assert chosen(measured) == [1], "of the library's code, where rows do not run together"
    assert chosen(cheap, widths={2: 1.25}) == [1, 5]
    assert chosen(measured, rows=[2, 4]) == [2, 4]


def test_tensor_parallelism_is_ranked_by_its_all_reduces_too() -> None:
    ranking = rank(
        12, replace(LAYERS_ONLY, head_ms=0.2), RATES, 4, staged=ranked(LAYERS_ONLY, BOUNDARIES), all_reduce_ms=0.01
    )
    assert [row.devices for row in ranking.parallel] == [2, 4]
    for row in ranking.parallel:
        assert row.ms_per_token == pytest.approx(4.8 / row.devices + 24 * 0.01 + 0.2)
    assert ranking.verdict.endswith("1.64 ms a token, 3.05 times (all-reduces of 0.01 ms)")
    assert ranking.footnotes == ()
    with pytest.raises(ValueError, match="both say how fast tensor parallelism is, drop one"):
        rank(12, LAYERS_ONLY, RATES, 4, efficiency=0.5, all_reduce_ms=0.01)


def test_the_ranking_is_sorted_and_fits() -> None:
    rows = ranked(LAYERS_ONLY, BOUNDARIES)
    assert [(row.devices, row.k) for row in rows] == [(4, 3), (4, 1), (2, 3)]
    assert [(row.devices, row.k) for row in ranked(LAYERS_ONLY, BOUNDARIES, 3)] == [(2, 3)]
    assert ranked(LAYERS_ONLY, BOUNDARIES, 1) == ()
    with pytest.raises(ValueError, match="cuts='3,6,9': with 8 layers"):
        rank_stages(8, LAYERS_ONLY, BOUNDARIES, 4, [1])


def test_stages_are_advised_where_they_are_the_fastest() -> None:
    ranking = rank(12, LAYERS_ONLY, RATES, 4, staged=STAGED)
    best, paper = ranking.staged[0], ranking.plans[0]
    assert ranking.gains
    assert ranking.verdict == (
        f"4 stages (cut after layers 3, 6 and 9) with k=3, rows=8 on 4 devices: {best.ms_per_token:.3g} ms a token, "
        f"{best.speedup:.2f} times ordinary decoding's speed; the paper's layout reaches {paper.speedup:.2f} times "
        "with exit layer 6 with k=3 on 4 devices"
    )
    parallel = rank(
        12, replace(LAYERS_ONLY, parallel_speedups={4: 3.5}), RATES, 4, staged=ranked(LAYERS_ONLY, BOUNDARIES)
    )
    assert parallel.verdict.endswith(
        "tensor parallelism on 4 devices is faster: 1.37 ms a token, 3.50 times (measured)"
    )
    slower = rank(
        12, replace(LAYERS_ONLY, parallel_speedups={4: 2.0}), RATES, 4, staged=ranked(LAYERS_ONLY, BOUNDARIES)
    )
    assert "tensor parallelism" not in slower.verdict


def test_the_papers_layout_is_advised_where_it_is_faster() -> None:
    shares = {((6,), 3): (0.1, 0.9)}
    ranking = rank(12, LAYERS_ONLY, RATES, 4, staged=ranked(LAYERS_ONLY, shares))
    assert ranking.verdict.startswith("exit layer 6 with k=3 on 4 devices: ")
    assert ranking.verdict.endswith("; 2 stages (cut after layer 6) with k=3 on 2 devices would reach 1.05 times")


def test_neither_is_advised_where_neither_gains() -> None:
    slow = replace(LAYERS_ONLY, hop_ms=0.2)
    ranking = rank(12, slow, {(6, 3): 0.01}, 4, staged=ranked(slow, {((6,), 3): (0.1, 0.9)}))
    assert not ranking.gains
    assert ranking.verdict.startswith("don't: the best, exit layer 6 with k=3")
    staged_best = rank(12, slow, {(6, 3): 0.01}, 2, staged=ranked(slow, {((6,), 3): (0.2, 0.8)}))
    assert staged_best.plans == ()
    reached = staged_best.staged[0].speedup
    assert staged_best.verdict == (
        f"don't: the best, 2 stages (cut after layer 6) with k=3, rows=8 on 2 devices, reaches {reached:.2f} times "
        "ordinary decoding's speed, less than 1.05: its candidates allow 1.11 times at the most, and a hop takes 0.2 ms"
    )


def test_the_best_that_fits_may_be_stages() -> None:
    (caution,) = rank(12, LAYERS_ONLY, RATES, 4, devices_here=2, staged=STAGED).cautions
    assert "the best that fits is 2 stages (cut after layer 6) with k=3, rows=8 on 2 devices: " in caution


def test_ranks_are_those_that_were_measured() -> None:
    """Of the first boundary: with 1, 3 and 4 candidates it has .6, .8 and .85 of the tokens."""
    known = {1: (0.6, 0.4), 3: (0.8, 0.2), 4: (0.85, 0.15), 6: (0.9, 0.1)}
    assert _ranks(known, 4) == pytest.approx((0.6, 0.1, 0.1, 0.05))
    assert _ranks(known, 1) == (0.6,)
    assert _ranks({3: (0.8, 0.2)}, 3) == ()
    first = [plan_stages(12, (6,), 3, (0.95, 0.05), LAYERS_ONLY, 1, ranks).ms_per_token for ranks in ((1, 0, 0), ())]
    assert first[0] < 0.9 * first[1], "with one row a pass the likeliest candidate alone comes in time"
    with pytest.raises(ValueError, match="give a share for each of 3 candidates"):
        plan_stages(12, (6,), 3, (0.9, 0.1), LAYERS_ONLY, 1, (1.0,))
