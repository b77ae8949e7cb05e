"""Quartiles of measured values."""

from collections.abc import Sequence

import numpy as np


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median and third quartile of at least one value.

    They stand a quarter, half and three quarters of the way from the first of the sorted values to the last, and are
    interpolated linearly between two values.
    """
    return np.percentile(values, (25, 50, 75)).tolist()
