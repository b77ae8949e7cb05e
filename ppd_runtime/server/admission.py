"""What the server refuses, more choices than may wait and all while it ends, and how long the others take."""

import asyncio
import math
import time
from collections.abc import Sequence

from ppd_runtime.methods.generation import Generation
from ppd_runtime.methods.request_queue import Place, RequestQueue
from ppd_runtime.server.errors import ApiError
from ppd_runtime.server.metrics import Metrics

_LOOK_EVERY_S = 0.02


class Admission:
    """Lets choices into a generator's queue, which counts them; `most_waiting` may wait beside those that run."""

    def __init__(self, queue: RequestQueue, most_waiting: int, metrics: Metrics) -> None:
        self._queue, self._most_waiting, self._metrics = queue, most_waiting, metrics
        self.draining = False
        """Whether the server is about to end."""
        self.unwell: list[str] = []
        """Workers that are needed and do not serve."""
        self._seconds_each = 1.0

    @property
    def is_open(self) -> bool:
        """Whether another choice would be let in, and served."""
        return not (self.draining or self.unwell) and self._queue.taken < self._most

    @property
    def _most(self) -> int:
        return self._queue.most + self._most_waiting

    def enter(self, choices: int) -> list[Place]:
        """Places for a request's choices; `leave` gives them back.

        Raises:
            ApiError: 400 for more choices than there ever is room for, 429 if there is none now, 503 at the end.
        """
        self.check_open()
        self.check_number(choices, "n")
        if not (places := self._queue.join(choices, self._most_waiting)):
            taken = self._queue.taken
            waiting_s = max(1, math.ceil(self._seconds_each * taken / self._queue.most))
            message = f"{taken} choices run or wait, {self._most} are the most: come again in {waiting_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=min(waiting_s, 60))
        return places

    def leave(self, places: Sequence[Place]) -> None:
        """Give places back; a choice that still runs ends within a token, and its place is free then."""
        for place in places:
            self._queue.cancel(place)

    def check_number(self, choices: int, field: str) -> None:
        """Raise ApiError for more choices than there ever is room for; `field` is what asks for them."""
        if choices > self._most:
            raise ApiError(400, f"{field}: {choices} choices at once, {self._most} are the most: ask for fewer", field)

    def check_open(self) -> None:
        """Raise ApiError if the server is about to end."""
        if self.draining:
            raise ApiError(503, "the server is shutting down: ask another one", retry_after_s=5)

    def note(self, generation: Generation) -> None:
        """Note the times of a choice that has ended; raises ApiError if the server began to end before its turn."""
        place = generation.place
        if place is None or place.waits_since is None or place.runs_since is None:
            self.check_open()
            return
        runs_s, queued_s = place.ran_until - place.runs_since, place.runs_since - place.waits_since
        self._metrics.note(generation.result, queued_s, queued_s + runs_s)
        self._seconds_each += 0.2 * (runs_s - self._seconds_each)

    def drain(self) -> int:
        """Refuse new and waiting choices from now on; returns the number of those that run."""
        self.draining = True
        self._queue.cancel_waiting()
        return len(self._queue.running)

    async def empty(self, timeout_s: float) -> int:
        """Wait until no choice is in; returns the number that still is after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (taken := self._queue.taken) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        return taken
