"""Checks of what people pass to the cost model; each raises a ValueError that names the value and the way out."""

import math
from numbers import Integral, Real

_MOST = 1e15  # far beyond any time or factor, far from overflow


def check_whole(name: str, value: int, least: int) -> None:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")


def check_workers(k: int, workers: int | None) -> None:
    """Sub-processes for k candidates: None, or 1 to k."""
    if workers is not None:
        check_whole("workers", workers, 1)
        if workers > k:
            raise ValueError(f"workers={workers} with k={k}: a worker needs a candidate, give {k} or fewer")


def check_share(name: str, value: float) -> None:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r}: give a number from 0 to 1")


def check_number(name: str, value: float, least: float = 0.0) -> None:
    """A finite number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value < math.inf:
        raise ValueError(f"{name}={value!r}: give a finite number of at least {least:g}")
    if value > _MOST:
        raise ValueError(f"{name}={value!r}: give a number of at most {_MOST:g}")


def check_layers(num_layers: int, exit_layer: int) -> None:
    """An exit layer that Theorem 4.1 covers: d/2 ≤ d̄ < d."""
    check_whole("num_layers", num_layers, 2)
    check_whole("exit_layer", exit_layer, 1)
    lowest = (num_layers + 1) // 2
    if not lowest <= exit_layer < num_layers:
        raise ValueError(
            f"exit_layer={exit_layer}: with {num_layers} layers choose {lowest} to {num_layers - 1} "
            "(at least half depth, before the last layer)"
        )
