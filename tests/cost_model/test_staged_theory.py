"""The staged layout's formulas against enumeration, Theorem 4.1 and what gpt-fast publishes."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.cost_model import staged, theory
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.settings.checks import even_cuts, stage_layers

rates = st.floats(0, 1)


@st.composite
def distributions(draw: st.DrawFn, least: int = 2, most: int = 8) -> tuple[float, ...]:
    """Shares of first boundaries, a few of them 0, for 2 stages and more."""
    weights = draw(st.lists(st.integers(0, 100), min_size=least, max_size=most).filter(any))
    return tuple(weight / sum(weights) for weight in weights)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
    """Layers, cuts and shares."""
    shares = draw(distributions())
    num_layers = draw(st.integers(len(shares), 40))
    cuts = draw(
        st.lists(st.integers(1, num_layers - 1), min_size=len(shares) - 1, max_size=len(shares) - 1, unique=True)
    )
    return num_layers, tuple(sorted(cuts)), shares


@given(distributions())
def test_both_forms_of_the_expected_first_boundary_are_one(shares: tuple[float, ...]) -> None:
    cumulative = [math.fsum(shares[:boundary]) for boundary in range(1, len(shares))]
    expected = staged.expected_first_boundary(shares)
    assert 1 + math.fsum(1 - share for share in cumulative) == pytest.approx(expected)
    assert 1 - 1e-12 <= expected <= len(shares) + 1e-12


@pytest.mark.parametrize("shares", [(0.7, 0.3), (0.5, 0.2, 0.3), (0.8, 0.1, 0.05, 0.05), (0.0, 0.4, 0.6)])
@pytest.mark.parametrize("num_new_tokens", [1, 2, 5])
def test_the_latency_is_the_mean_over_all_texts(shares: tuple[float, ...], num_new_tokens: int) -> None:
    stages, times = len(shares), Times(layer=2, hop=0.5, exit_head=3, head=4)
    cuts = even_cuts(12, stages)
    stage = 12 / stages * 2 + 0.5
    total = 0.0
    for text in itertools.product(range(1, stages + 1), repeat=num_new_tokens - 1):
        probability = math.prod(shares[boundary - 1] for boundary in text)
        heads = 4 + sum(4 if boundary == stages else 3 for boundary in text)
        total += probability * ((stages + sum(text)) * stage + heads)
    assert staged.expected_time(12, cuts, shares, num_new_tokens, times) == pytest.approx(total)


@given(st.integers(1, 30), rates, st.integers(1, 500))
def test_two_stages_are_theorem_4_1(half: int, p: float, num_new_tokens: int) -> None:
    layout = (2 * half, (half,), (p, 1 - p))
    assert staged.expected_first_boundary((p, 1 - p)) == pytest.approx(2 * (1 - p / 2))
    expected = theory.expected_latency(2 * half, half, p, num_new_tokens)
    assert staged.expected_time(*layout, num_new_tokens, Times()) == pytest.approx(expected)
    ratio = theory.latency_ratio(2 * half, half, p, num_new_tokens)
    assert staged.latency_ratio(*layout, num_new_tokens) == pytest.approx(ratio)
    assert staged.token_time(*layout, Times()) == pytest.approx(2 * half * (1 - p / 2))


@given(st.integers(1, 30), rates, st.integers(1, 8))
def test_compute_of_two_stages_is_equation_6(half: int, p: float, k: int) -> None:
    rows = staged.dropped_rows(k, (p, 1 - p))
    assert staged.compute_per_token(2 * half, (half,), rows) == pytest.approx((2 + k - p) / 2)


@pytest.mark.parametrize("stages", range(2, 9))
def test_all_certain_and_never(stages: int) -> None:
    others = (0.0,) * (stages - 1)
    assert staged.speedup_bound((1.0, *others)) == stages
    assert staged.speedup_bound((*others, 1.0)) == 1
    times = Times(layer=2, head=5, exit_head=3)
    never = staged.token_time(2 * stages, even_cuts(2 * stages, stages), (*others, 1.0), times)
    assert never == theory.miss_time(2 * stages, times)


@given(layouts(), st.floats(0, 5), st.floats(0, 5))
def test_a_time_by_the_formula(layout: tuple[int, tuple[int, ...], tuple[float, ...]], hop: float, head: float) -> None:
    num_layers, cuts, shares = layout
    longest = max(stage_layers(num_layers, cuts))
    times = Times(layer=1.5, head=head, exit_head=head, hop=hop)
    expected = (longest * 1.5 + hop) * staged.expected_first_boundary(shares) + head
    assert staged.token_time(num_layers, cuts, shares, times) == pytest.approx(expected)
    long_text = staged.latency_ratio(num_layers, cuts, shares, 10**7, times)
    assert long_text == pytest.approx(expected / (num_layers * 1.5 + head), rel=1e-4)


@given(distributions(), st.data())
def test_an_earlier_boundary_is_never_slower(shares: tuple[float, ...], data: st.DataObject) -> None:
    late = data.draw(st.integers(1, len(shares) - 1))
    early = data.draw(st.integers(0, late - 1))
    moved = list(shares)
    moved[early], moved[late] = shares[early] + shares[late], 0.0
    assert staged.expected_first_boundary(moved) <= staged.expected_first_boundary(shares) + 1e-12


@given(st.integers(2, 80), st.data())
def test_even_cuts_are_even(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, num_layers))
    layers = stage_layers(num_layers, even_cuts(num_layers, stages))
    assert (len(layers), sum(layers)) == (stages, num_layers)
    assert max(layers) - min(layers) <= 1


@given(distributions(), st.integers(1, 8))
def test_boundaries_up_to_the_first_right_one_add_k_rows(shares: tuple[float, ...], k: int) -> None:
    last = len(shares)
    rows = (k * min(boundary, last - 1) - (boundary < last) for boundary in range(1, last + 1))
    assert staged.dropped_rows(k, shares) == pytest.approx(sum(p * n for p, n in zip(shares, rows, strict=True)))


@pytest.mark.parametrize(
    ("devices", "tokens_per_s", "speedup"), [(2, 168.84, 1.61), (4, 254.02, 2.42), (8, 328.43, 3.13)]
)
def test_tensor_parallelism_has_gpt_fasts_figures(devices: int, tokens_per_s: float, speedup: float) -> None:
    alone, together = 1000 / 104.9, 1000 / tokens_per_s
    assert alone / 32 == pytest.approx(staged.GPT_FAST_LAYER_MS, abs=5e-4)
    all_reduce = (together - alone / devices) / 64
    low, high = staged.GPT_FAST_ALL_REDUCE_MS
    assert low <= round(all_reduce, 3) <= high
    times = Times(layer=alone / 32)
    assert staged.tensor_parallel_time(32, devices, times, all_reduce) == pytest.approx(together)
    assert alone / together == pytest.approx(speedup, abs=6e-3)


def test_tensor_parallelism_on_one_device_is_ordinary_decoding() -> None:
    times = Times(layer=2, head=3)
    assert staged.tensor_parallel_time(10, 1, times, 0.5) == theory.miss_time(10, times)
    assert staged.tensor_parallel_time(10, 4, times, 0.5) == 10 * 2 / 4 + 2 * 10 * 0.5 + 3
