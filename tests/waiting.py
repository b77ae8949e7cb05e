"""Waiting for what comes by itself."""

import time
from collections.abc import Callable

DEADLINE_S = 60


def wait_until(holds: Callable[[], object]) -> None:
    """Look again and again, for a minute at most."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
