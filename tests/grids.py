"""Grids of parameters: each pair of values in every run, all combinations in the night."""

import itertools
from collections.abc import Sequence

import pytest


def pairs_first(*axes: Sequence[object]) -> list[object]:
    """All combinations of the axes' values for `pytest.mark.parametrize`; those that add no new pair are `nightly`."""
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a, b in itertools.product(range(len(axes[i])), range(len(axes[j])))
    }
    left = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = set()
    while missing:
        best = max(left, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.add(best)
        left.remove(best)
    rows = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, row, strict=True)), marks=() if row in chosen else nightly)
        for row in rows
    ]


nightly = pytest.mark.nightly


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
