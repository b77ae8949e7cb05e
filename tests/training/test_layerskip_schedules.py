"""LayerSkip's schedules against numbers worked out from the paper's formulas by hand."""

import math

import numpy as np
import pytest

from ppd_runtime.training.layerskip_schedules import (
    CONSTANT,
    EXPONENTIAL,
    dropout_by_layer,
    dropout_by_step,
    dropout_rates,
    exit_scales,
    exit_weights,
    gradual_exits,
    rotational_exits,
)


def layers(enabled: np.ndarray) -> list[int]:
    """The numbers of the enabled layers."""
    return np.flatnonzero(enabled).tolist()


def test_dropout_rises_exponentially_over_the_layers() -> None:
    """e^(l ln 2 / (L-1)) - 1 is 2^(l / (L-1)) - 1: in the middle of five layers √2 - 1."""
    assert dropout_by_layer(5).tolist() == pytest.approx([0.0, 0.189207, 0.414214, 0.681793, 1.0], abs=1e-6)
    assert dropout_by_layer(32)[31] == pytest.approx(1.0)


def test_dropout_over_time() -> None:
    assert [dropout_by_step(CONSTANT, step, 3) for step in range(3)] == [1.0, 1.0, 1.0]
    exponential = [dropout_by_step(EXPONENTIAL, step, 3) for step in range(3)]
    assert exponential == pytest.approx([0.0, math.sqrt(2) - 1, 1.0])


def test_dropout_rates_are_the_product() -> None:
    """Equation 2 with p_max = 0.2, half way in layer 2 of 5: 0.2 (√2 - 1)² = 0.0343."""
    assert dropout_rates(0.2, EXPONENTIAL, 1, 5, 3)[2] == pytest.approx(0.0343146, abs=1e-7)
    assert dropout_rates(0.2, CONSTANT, 0, 5, 3).tolist() == pytest.approx(
        [0, 0.037841, 0.082843, 0.136359, 0.2], abs=1e-6
    )


def test_exit_scales() -> None:
    """Sums 0, 1, 3, 6 times e_scale; the last of five is 4 + e_scale (0 + 1 + 2 + 3)."""
    assert exit_scales(0.2, 5).tolist() == pytest.approx([0.0, 0.2, 0.6, 1.2, 5.2])
    assert exit_scales(1.0, 5).tolist() == [0, 1, 3, 6, 10]
    assert exit_scales(0.0, 5).tolist() == [0, 0, 0, 0, 4]


def test_rotation_enables_each_layer_once_in_r_steps() -> None:
    assert [layers(rotational_exits(step, 5, 3)) for step in range(4)] == [[0, 3], [1, 4], [2], [0, 3]]
    assert [layers(rotational_exits(step, 3, 1)) for step in range(2)] == [[0, 1, 2], [0, 1, 2]]


def test_gradual_exits_join_one_by_one() -> None:
    """T = 40 and L = 4: one more every 40 / 8 = 5 steps, all of them from step 15."""
    found = [layers(gradual_exits(step, 4, 40)) for step in (0, 4, 5, 9, 10, 14, 15, 39)]
    assert found == [[3], [3], [2, 3], [2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_weights_of_what_is_enabled_sum_to_one() -> None:
    """Equation 6 with the scales of five layers at 0.2: 0.6 and 5.2 of 5.8; full depth is never left out."""
    weights = exit_weights(rotational_exits(2, 5, 3), 0.2)
    assert weights.tolist() == pytest.approx([0, 0, 0.6 / 5.8, 0, 5.2 / 5.8])
    assert exit_weights(rotational_exits(0, 5, 5), 0.2).tolist() == [0, 0, 0, 0, 1]
    assert exit_weights(gradual_exits(39, 5, 40), 1.0).tolist() == pytest.approx([0, 0.05, 0.15, 0.3, 0.5])
