"""The formulas of drafters at boundary 0: their products, and drafting and verifying's where rows cost nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppd_runtime.cost_model import drafting, theory

chance = st.floats(0, 1)


@given(st.lists(chance, max_size=6))
def test_a_chain_adds_up_products(chances: list[float]) -> None:
    products = [math.prod(chances[:length]) for length in range(1, len(chances) + 1)]
    assert drafting.tokens_per_pass(drafting.chain(chances)) == pytest.approx(1 + sum(products))


@given(st.lists(chance, max_size=6), st.integers(0, 6), st.floats(0, 1))
def test_rows_without_cost_are_drafting_and_verifying(chances: list[float], steps: int, step_cost: float) -> None:
    paths = drafting.chain(chances)
    ratio = theory.drafting_ratio(drafting.tokens_per_pass(paths), steps, step_cost)
    assert drafting.speedup(paths, 0.0, steps * step_cost) == pytest.approx(1 / ratio)
