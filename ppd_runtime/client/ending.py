"""Why a request ends before its text does: another thread has cancelled it, or its time is up."""

import math
import time

CANCELLED, TIMEOUT = "cancelled", "timeout"
"""Reasons to finish; see `results.GenerationResult.finish_reason`."""


class Ending:
    """What may end one request early. One thread decodes and asks; any other may cancel."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._deadline = math.inf
        self._cancelled = False

    def start_clock(self) -> None:
        """The request's time begins now; a second call changes nothing."""
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._timeout_s

    def cancel(self) -> None:
        """End it as soon as may be."""
        self._cancelled = True

    def reason(self) -> str | None:
        """Why to end now; None: go on."""
        if self._cancelled:
            return CANCELLED
        return TIMEOUT if time.monotonic() >= self._deadline else None

    def seconds_left(self) -> float:
        """Seconds until its time is up; 0 if it is to end now, infinity without a limit."""
        return 0.0 if self._cancelled else max(self._deadline - time.monotonic(), 0.0)
