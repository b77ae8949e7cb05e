"""In which row each position lies: beside a plain list."""

import random

import numpy as np
import pytest
import torch

from ppd_runtime.models.stage.row_order import RowOrder


def listed(order: RowOrder, positions: int) -> list[int]:
    """As code that is given an address reads it."""
    memory = (np.ctypeslib.ctypes.c_int64 * positions).from_address(order.address(positions))
    return list(memory)


@pytest.mark.parametrize("seed", range(10))
def test_as_a_list(seed: int) -> None:
    rng, order, expected = random.Random(seed), RowOrder(), list(range(60))
    for _ in range(80):
        if rng.random() < 0.7:
            one, other = (rng.randrange(60) for _ in range(2))
            order.exchange(one, other)
            expected[one], expected[other] = expected[other], expected[one]
        else:
            position, nodes = rng.randrange(50), sorted(rng.sample(range(10), rng.randrange(1, 6)))
            order.keep(position, nodes)
            part = expected[position : position + 1 + nodes[-1]]
            others = [row for i, row in enumerate(part) if i not in nodes]
            expected[position : position + 1 + nodes[-1]] = [part[node] for node in nodes] + others
        first, end = sorted(rng.randrange(61) for _ in range(2))
        assert torch.arange(60)[order.rows(first, end)].tolist() == expected[first:end]
        in_place = expected[first:end] == list(range(first, end))
        assert isinstance(order.rows(first, end), slice) == in_place, "a view where it can be one"
        assert order.extent > max((i for i, row in enumerate(expected) if row != i), default=-1)
        assert listed(order, 60) == expected


def test_it_grows_with_the_text() -> None:
    order = RowOrder()
    order.exchange(2, 5)
    assert order.extent == 6
    assert listed(order, 5000) == [0, 1, 5, 3, 4, 2, *range(6, 5000)]
    order.exchange(4999, 9000)
    assert listed(order, 9001)[4999] == 9000
    assert order.rows(3, 5) == slice(3, 5)
