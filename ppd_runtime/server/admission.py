"""Who may come in: room is reserved before a request waits, and given back when its answer has ended."""

import asyncio
import math

from ppd_runtime.server.errors import ApiError


class Admission:
    """Counts the choices that run and wait; `at_once` of them run, and `most_waiting` more may wait."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self.at_once, self.most = at_once, at_once + most_waiting
        self.taken = 0
        """Choices that run or wait."""
        self.draining = False
        """Whether the server is about to end."""
        self.unwell: list[str] = []
        """Workers that are needed and do not serve."""
        self._seconds_each = 1.0
        self._emptied = asyncio.Event()

    def enter(self, choices: int) -> "Ticket":
        """Reserve room.

        Raises:
            ApiError: 400 for more choices than there ever is room for, 429 if there is none now, 503 at the end.
        """
        self.check_open()
        self.check_number(choices, "n")
        if self.taken + choices > self.most:
            waiting_s = max(1, math.ceil(self._seconds_each * self.taken / self.at_once))
            message = f"{self.taken} choices run or wait, {self.most} are the most: come again in {waiting_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=min(waiting_s, 60))
        self.taken += choices
        return Ticket(self, choices)

    def check_number(self, choices: int, field: str) -> None:
        """Raise ApiError for more choices than there ever is room for; `field` is what asks for them."""
        if choices > self.most:
            raise ApiError(400, f"{field}: {choices} choices at once, {self.most} are the most: ask for fewer", field)

    def check_open(self) -> None:
        """Raise ApiError if the server is about to end."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask another one", retry_after_s=5)

    def note_time(self, seconds: float) -> None:
        """Note a choice's time."""
        self._seconds_each += 0.2 * (seconds - self._seconds_each)

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no request is in; False if one still is after `timeout_s`."""
        self._emptied.clear()
        if self.taken:
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except asyncio.TimeoutError:
                return False
        return True

    def leave(self, choices: int) -> None:
        """Choices have ended."""
        self.taken -= choices
        if not self.taken:
            self._emptied.set()


class Ticket:
    """Room for a request's choices, until it is closed; a second time does nothing."""

    def __init__(self, admission: Admission, choices: int) -> None:
        self._admission, self._choices = admission, choices

    def close(self) -> None:
        """Give the room back."""
        if self._choices:
            self._admission.leave(self._choices)
            self._choices = 0
