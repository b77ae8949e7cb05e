"""Every number that people pass is checked by one of few functions, in one line that names it."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from ppd_runtime.settings.checks import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_range,
    check_share,
    check_whole,
)


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (lambda v: check_int("n", v), [-3, 0], [True, 1.0, "1", None, np.int64(1)], "give a whole number"),
        (lambda v: check_int("n", v, 1, 9), [1, 9], [0, -1], "must be at least 1"),
        (lambda v: check_int("n", v, 1, 9), [5], [10], "must be at most 9"),
        (lambda v: check_whole("n", v, 1), [1, np.int64(2)], [0, True, 1.5, "2"], "give a whole number of at least 1"),
        (lambda v: check_share("n", v), [0, 1, 0.5], [-0.1, 1.1, math.nan, True, "0"], "give a number from 0 to 1"),
        (lambda v: check_share("n", v, below_one=True), [0, 0.9], [1, 1.0], "give a number from 0 to below 1"),
        (
            lambda v: check_number("n", v),
            [0, 2.5],
            [-1, math.inf, math.nan, False],
            "give a finite number of at least 0",
        ),
        (lambda v: check_range("n", v, lambda x: x > 0, "above 0"), [1], [0, math.inf], "must be finite and above 0"),
        (lambda v: check_range("n", v, lambda x: x > 0, "above 0"), [0.5], ["1", True], "give a number above 0"),
        (lambda v: check_bool("n", v), [True, False], [0, 1, None, "yes"], "give True or False"),
        (lambda v: check_choice("n", v, ("a", "b")), ["a", "b"], ["c", None], "choose one of a, b"),
    ],
)
def test_a_refusal_names_the_value_and_the_way_out(
    check: Callable[[object], None], good: list[object], bad: list[object], words: str
) -> None:
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ValueError) as error:
            check(value)
        assert str(error.value).startswith("n=")
        assert str(error.value).endswith(words)
