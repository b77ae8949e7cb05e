"""The pipeline's state machines on virtual clocks, beside Theorem 4.1."""

import itertools
import random
import statistics

import pytest
from grids import pairs_first
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from virtual_paper import Setting, simulate, simulate_runs

from ppd_runtime.cost_model import theory
from ppd_runtime.cost_model.theory import Times

small = st.integers(0, 6)


@st.composite
def settings_and_winners(draw: st.DrawFn) -> tuple[Setting, list[int]]:
    """Settings of Algorithm 2 for which the formulas with overheads are exact; see `theory.hit_time`."""
    num_layers, k, tokens = draw(st.integers(2, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 14))
    exit_layer = draw(st.integers((num_layers + 1) // 2, num_layers - 1))
    width = draw(st.sampled_from([1.0, 1.25, 1.5])) if k > 1 else 1.0
    times = Times(draw(st.integers(1, 4)), draw(small), draw(small), draw(small), width)
    workers = draw(st.integers(1, k)) if width == 1 else 1
    spare, early = (2 * exit_layer - num_layers) * times.layer, (num_layers - exit_layer) * times.layer
    assume(workers == 1 or (times.hop < spare if spare else times.hop <= times.exit_head))
    assume(times.exit_head + (width - 1) * early <= times.head + spare)
    assume(2 * times.hop + times.exit_head <= times.head + early)
    assume(2 * times.hop + times.exit_head + (width - 1) * early <= times.head + early)
    winners = draw(st.lists(st.integers(0, k), min_size=tokens - 1, max_size=tokens - 1))
    return Setting(num_layers, exit_layer, k, tokens, times, workers=workers, run_ahead=False), winners


@given(settings_and_winners())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_pattern_takes_exactly_the_formulas_time(case: tuple[Setting, list[int]]) -> None:
    setting, winners = case
    run = simulate(setting, winners)
    hits = sum(winner > 0 for winner in winners)
    assert (run.hits, run.misses) == (hits, len(winners) - hits)
    miss = theory.miss_time(setting.num_layers, setting.times)
    hit = theory.hit_time(setting.num_layers, setting.exit_layer, setting.times)
    assert run.time == pytest.approx(miss * (1 + run.misses) + hit * hits)
    head_start = setting.num_layers - setting.exit_layer
    assert run.main_layer_passes == setting.num_layers * setting.num_new_tokens - head_start * hits
    assert run.main_recomputed_layer_passes == 0
    shares = [setting.candidates_of(rank) for rank in range(1, setting.num_subs + 1)]
    assert sum(shares) == setting.k
    assert run.sub_layer_passes == tuple(share * head_start * len(winners) for share in shares)


def test_running_ahead_takes_theorem_4_1s_time_for_every_pattern() -> None:
    for tokens in range(1, 9):
        setting = Setting(8, 4, 1, tokens)
        assert setting.runs_ahead
        for winners in itertools.product((0, 1), repeat=tokens - 1):
            run = simulate(setting, winners)
            assert (run.time, run.hits, run.stall_time) == (8 * tokens - 4 * sum(winners), sum(winners), 0)
            assert run.main_recomputed_layer_passes == 0


@pytest.mark.parametrize("hop", [0.5, 1.0, 3.0])
def test_hits_of_running_ahead_wait_for_no_hop(hop: float) -> None:
    """Algorithm 2's pay two; below half of a pass and the heads, one more hop is one candidate further ahead."""
    times = Times(head=1.0, exit_head=1.0, hop=hop)
    ahead, algorithm2 = (simulate(Setting(12, 6, 1, 101, times, run_ahead=on), [1] * 100) for on in (True, False))
    assert ahead.hits == algorithm2.hits == 100
    assert ahead.time <= 13 + 100 * 7 + 2 * hop
    assert algorithm2.time == 13 + 100 * (7 + 2 * hop)


@pytest.mark.parametrize(("exit_head", "hop"), [(1.0, 0.0), (1.0, 0.1), (1.5, 0.5), (0.0, 3.0), (1.0, 5.0)])
def test_what_running_ahead_costs_at_the_most(exit_head: float, hop: float) -> None:
    """After a hit a miss can wait for entries, and run one pass again; the hit behind it can wait as long."""
    times, generator = Times(head=1.0, exit_head=exit_head, hop=hop), random.Random(4)
    patterns = [([1] * hits + [0] * misses) * 8 for hits in (1, 2, 7, 9) for misses in (1, 2, 3)]
    patterns += [[int(generator.random() < rate) for _ in range(60)] for rate in (0.0, 0.2, 0.5, 0.8)]
    for winners in patterns:
        ahead, algorithm2 = (
            simulate(Setting(12, 6, 1, len(winners) + 1, times, run_ahead=on), winners) for on in (True, False)
        )
        ordinary = theory.ordinary_time(12, len(winners) + 1, times)
        assert ahead.time <= 1.4 * algorithm2.time
        assert ahead.time <= 1.35 * ordinary
        if not any(winners):
            assert ahead.time == algorithm2.time == ordinary


def test_an_early_start_from_a_text_that_never_came_to_be_is_not_taken() -> None:
    """Behind each wrong candidate the exit head names the right token; its early start is of another text."""
    setting = Setting(12, 6, 1, 9, Times(head=1.0, exit_head=0.5, hop=0.1))
    run = simulate(setting, [0, 1] * 4)
    assert run.hits <= 4
    assert run.sub_layer_passes[0] > 6 * 8  # some were started
    assert run.main_layer_passes == 12 * 9 - 6 * run.hits


@pytest.mark.parametrize(
    ("num_layers", "exit_layer", "k", "p", "times"),
    [
        (9, 5, 1, 0.5, Times()),
        (8, 4, 3, 0.68, Times(2.0, 1.5, 1.0, 0.5)),
    ],
)
def test_the_mean_is_the_predicted_one(num_layers: int, exit_layer: int, k: int, p: float, times: Times) -> None:
    setting = Setting(num_layers, exit_layer, k, 32, times)
    runs = simulate_runs(setting, p, 150, seed=1)
    spent = [run.time for run in runs]
    predicted, error = theory.expected_time(num_layers, exit_layer, p, 32, times), statistics.stdev(spent) / 150**0.5
    assert 0 < error < 0.02 * predicted
    assert abs(statistics.fmean(spent) - predicted) < 4 * error
    assert statistics.fmean(run.hits for run in runs) == pytest.approx(31 * p, abs=1.5)
    passes, compute = (
        statistics.fmean(getattr(run, name) for run in runs) for name in ("main_layer_passes", "layer_passes")
    )
    assert passes == pytest.approx(theory.expected_latency(num_layers, exit_layer, p, 32), rel=0.03)
    unasked = k * (num_layers - exit_layer)
    assert compute + unasked == pytest.approx(theory.expected_compute(num_layers, exit_layer, k, p, 32), rel=0.03)


def test_hops_longer_than_the_head_start_leave_ordinary_decoding() -> None:
    run = simulate(Setting(8, 4, 1, 40, Times(hop=20.0), run_ahead=False), [1] * 39)
    assert (run.hits, run.misses) == (0, 39)
    assert run.main_layer_passes == 8 * 40


@pytest.mark.parametrize("hop", [5.0, 6.0])
def test_an_exit_state_that_comes_while_waiting_for_entries_is_used(hop: float) -> None:
    setting = Setting(40, 22, 2, 13, Times(head=12.0, hop=hop))
    assert simulate(setting, [1, 2] * 6).hits == 12


def test_patterns_of_any_order_and_k_end() -> None:
    for k, tokens in itertools.product((1, 2, 3), (2, 3, 4)):
        for winners in itertools.product(range(k + 1), repeat=tokens - 1):
            run = simulate(Setting(5, 3, k, tokens, Times(1.0, 1.0, 2.0, 1.5)), winners)
            assert run.hits + run.misses == tokens - 1


@pytest.mark.parametrize(
    ("k", "factor", "hop", "match_rate"), pairs_first([1, 3], [1.0, 2.0, 3.0], [0.1, 12.0, 20.0], [0.0, 0.7, 1.0])
)
def test_stragglers_and_slow_links_never_cost_more_than_ordinary_decoding(
    k: int, factor: float, hop: float, match_rate: float
) -> None:
    """What is not ready in time is not waited for longer than the same work takes the main process.

    In Algorithm 2: one that runs ahead may also let the main process wait for entries after its hits.
    """
    slow = dict.fromkeys(range(1, k + 1), factor)
    times = Times(head=1.0, exit_head=1.0, hop=hop)
    setting = Setting(40, 20, k, 128, times, slow=slow, run_ahead=False)
    ordinary = theory.ordinary_time(40, 128, setting.times)
    assert max(run.time for run in simulate_runs(setting, match_rate, runs=5)) <= 1.04 * ordinary
