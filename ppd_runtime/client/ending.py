"""Why a request ends before its text does: another thread has cancelled it, or its time is up."""

import math
import time

CANCELLED, TIMEOUT = "cancelled", "timeout"
"""Reasons to finish; see `results.GenerationResult.finish_reason`."""


class Ending:
    """Ends one request early. One thread decodes and asks for the reason; any other may cancel."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._deadline = math.inf
        self._cancelled = False

    def start_clock(self) -> None:
        """Start the request's time limit; a second call changes nothing."""
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self._timeout_s

    def cancel(self) -> None:
        """End the request as soon as possible."""
        self._cancelled = True

    def reason(self) -> str | None:
        """The reason to end now; None if the request continues."""
        if self._cancelled:
            return CANCELLED
        return TIMEOUT if time.monotonic() >= self._deadline else None

    def seconds_left(self) -> float:
        """Seconds until the time limit; 0 after a cancel, infinity without a limit."""
        return 0.0 if self._cancelled else max(self._deadline - time.monotonic(), 0.0)
