"""How quartiles are defined, wherever they are given."""

import pytest

from ppd_runtime.tune.quartiles import quartiles


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], [7, 7, 7]), ([4.0, 2.0], [2.5, 3, 3.5]), ([5, 1, 3, 2, 4], [2, 3, 4]), ([4, 1, 8, 2], [1.75, 3, 5])],
)
def test_quartiles_are_interpolated_linearly(values: list[float], expected: list[float]) -> None:
    assert quartiles(values) == expected
