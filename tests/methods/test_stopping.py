"""Stopping rules: the papers' formulas, and no draft longer than it may be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.methods.stopping import Adaptation, StopDrafting, Stopping

CONFIDENCES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def length(stopping: Stopping, confidences: list[float], most: int = 100) -> int:
    """Tokens that are drafted when they are as sure as `confidences`."""
    stop = StopDrafting(stopping)
    stop.begin_draft(most)
    for number, confidence in enumerate(confidences):
        if not stop.wants_more():
            return number
        stop.drafted(confidence)
    return len(confidences)


@given(CONFIDENCES, st.integers(1, 8), st.integers(0, 8))
def test_constant_length(confidences: list[float], most: int, allowed: int) -> None:
    assert length(Stopping(most=most), confidences, allowed) == min(len(confidences), most, allowed)


@given(CONFIDENCES, st.floats(0, 1))
def test_draft_and_verify_stops_behind_the_first_doubtful_token(confidences: list[float], threshold: float) -> None:
    doubtful = [i for i, confidence in enumerate(confidences) if confidence < threshold]
    expected = doubtful[0] + 1 if doubtful else len(confidences)
    assert length(Stopping("confidence", 100, threshold), confidences) == expected


@pytest.mark.parametrize("rule", ["product", "probe"])
@given(CONFIDENCES, st.floats(0, 1))
def test_adaspeed_stops_where_the_product_is_doubtful(rule: str, confidences: list[float], threshold: float) -> None:
    together = [math.prod(confidences[: i + 1]) for i in range(len(confidences))]
    doubtful = [i for i, product in enumerate(together) if product < threshold]
    expected = doubtful[0] + 1 if doubtful else len(confidences)
    assert length(Stopping(rule, 100, threshold), confidences) == expected


def test_a_draft_forgets_the_last_ones_product() -> None:
    stop = StopDrafting(Stopping("product", 10, 0.5))
    for _ in range(2):
        stop.begin_draft(10)
        stop.drafted(0.6)
        assert stop.wants_more()
        stop.drafted(0.6)
        assert not stop.wants_more()


def test_the_threshold_follows_the_acceptance_rate() -> None:
    """The appendix' formulas by hand: AR ← β₁AR + (1 − β₁)ARₑ, γ̃ = γ ± ε, γ ← β₂γ + (1 − β₂)γ̃."""
    adaptation = Adaptation(target_rate=0.9, step=0.1, rate_memory=0.5, threshold_memory=0.75)
    stop = StopDrafting(Stopping("product", 10, 0.8, adaptation))
    stop.judged(drafted=4, accepted=2)  # AR 0.9 → 0.7, at most 0.9: γ̃ = 0.9
    assert stop.threshold == pytest.approx(0.75 * 0.8 + 0.25 * 0.9)
    before = stop.threshold
    stop.judged(drafted=0, accepted=0)
    assert stop.threshold == before
    for _ in range(5):
        stop.judged(drafted=3, accepted=3)  # AR climbs to 0.85, then above 0.9
    assert stop.threshold == pytest.approx(before + 0.25 * (1 - 4) * 0.1)


@pytest.mark.parametrize("accepted", [0, 4])
def test_a_threshold_stays_a_probability(accepted: int) -> None:
    stop = StopDrafting(Stopping("product", 10, 0.5, Adaptation(target_rate=0.5, step=1, threshold_memory=0)))
    for _ in range(20):
        stop.judged(drafted=4, accepted=accepted)
    assert stop.threshold == (1.0 if accepted == 0 else 0.0)
