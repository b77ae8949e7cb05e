"""The first-come, first-served queue that admits every request: it limits running requests and their total tokens."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppd_runtime.client.ending import Ending

_TURN_DEADLINE_S = 3600.0
_LOOK_EVERY_S = 0.25
MOST_WAITING = 1024
"""Most threads that may wait."""
_LEAST_SHARE = 1024  # tokens of a request; without room for that, fewer run at once


class Room(NamedTuple):
    """Tokens that one request may have, prompt included."""

    most: int
    """The most, if others wait."""
    share: int
    """The share if as many run at once as may; at least 1024, up to `most`."""


@dataclass(eq=False)
class Place:
    """A request's place in a queue: it is kept for the request, which then waits for its turn, and then runs."""

    tokens: int = 0
    """Prompt tokens and those the request may get."""
    ending: Ending | None = None
    at_turn: Callable[[], object] | None = None
    thread: int | None = None
    """The thread that has waited for the turn, if one has."""
    waits_since: float | None = None
    """When the request began to wait, by the monotonic clock."""
    runs_since: float | None = None
    """When its turn came."""
    ran_until: float = 0.0
    """When it left."""

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits for its turn."""
        return self.waits_since is not None and self.runs_since is None

    def tell(self) -> None:
        """Call `at_turn`, once, whichever thread comes first."""
        if at_turn := vars(self).pop("at_turn", None):
            at_turn()


class RequestQueue:
    """Room for `most` requests at once, and for `most_tokens` tokens in all; None: any number of tokens."""

    def __init__(self, most: int, most_tokens: int | None = None) -> None:
        self.most, self.most_tokens = most, most_tokens
        self._lock = threading.RLock()  # a signal handler or a dropped stream may come in the middle
        self._places: list[Place] = []
        """All places, those of waiting requests in the order of their turns."""

    def join(self, number: int = 1, most_waiting: float = math.inf) -> list[Place]:
        """Keep places for `number` requests; none at all if more than `most_waiting` would have to wait."""
        with self._lock:
            if len(self._places) + number > self.most + most_waiting:
                return []
            places = [Place() for _ in range(number)]
            self._places += places
        return places

    def line_up(self, place: Place, tokens: int, ending: Ending, at_turn: Callable[[], object]) -> None:
        """Let a request of `tokens` tokens, at most `most_tokens`, wait for its turn behind all that wait.

        `at_turn` is called once, in any thread: the turn has come, or the request was cancelled before.
        """
        place.tokens, place.ending, place.at_turn = tokens, ending, at_turn
        with self._lock:
            if place in self._places:
                self._places.remove(place)
                place.waits_since = time.monotonic()
                self._places.append(place)
            else:  # it was cancelled, or has left
                ending.cancel()
        self._go_on()
        if ending.reason():
            self.cancel(place)

    def wait(self, place: Place, tokens: int, ending: Ending) -> None:
        """Line up, and wait in this thread for the turn, or until the request is cancelled.

        Raises:
            RuntimeError: this thread would wait for itself, or too many wait.
            TimeoutError: others have held their places for too long.
        """
        self.check_own(tokens)
        if len(self.waiting) >= MOST_WAITING:
            raise RuntimeError(f"{MOST_WAITING} calls wait for this runtime: try again later")
        turn, deadline = threading.Event(), time.monotonic() + _TURN_DEADLINE_S
        place.thread = threading.get_ident()
        self.line_up(place, tokens, ending, turn.set)
        while not turn.wait(min(_LOOK_EVERY_S, _TURN_DEADLINE_S)) and place.is_waiting:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"other calls have held this runtime for {_TURN_DEADLINE_S:.0f} s")
            self._go_on()  # Ctrl-C may have interrupted the call that was to let this one run

    def leave(self, place: Place, unless_running: bool = False) -> None:
        """Give a place back; a second call does nothing."""
        with self._lock:
            if place in self._places and not (unless_running and place.runs_since is not None):
                self._places.remove(place)
                place.ran_until = time.monotonic()
        self._go_on()

    def cancel(self, place: Place) -> None:
        """End a request: one that runs leaves within a token, any other leaves now."""
        if place.ending is not None:
            place.ending.cancel()
        self.leave(place, unless_running=True)
        if place.runs_since is None:
            place.tell()

    def cancel_running(self) -> None:
        """End all requests that run."""
        for place in self.running:
            self.cancel(place)

    def cancel_waiting(self) -> None:
        """End all requests that do not run: those that wait, and those whose place is only kept so far."""
        with self._lock:
            places = [place for place in self._places if place.runs_since is None]
        for place in reversed(places):
            self.cancel(place)

    def check_own(self, tokens: int) -> None:
        """Raise RuntimeError if this thread's own requests leave no room for another: it would wait for itself."""
        own = [place for place in self.running if place.thread == threading.get_ident()]
        if own and not self._fits(own, tokens):
            others = "another stream" if len(own) == 1 else f"{len(own)} other streams"
            are = "is" if len(own) == 1 else "are"
            raise RuntimeError(f"{others} of this runtime {are} open in this thread: exhaust or close one first")

    @property
    def taken(self) -> int:
        """Places that are kept, wait or run."""
        return len(self._places)

    @property
    def waiting(self) -> list[Place]:
        """Places of requests that wait for their turn, the next one first."""
        with self._lock:
            return [place for place in self._places if place.is_waiting]

    @property
    def running(self) -> list[Place]:
        """Places of requests that run."""
        with self._lock:
            return [place for place in self._places if place.runs_since is not None]

    @property
    def room(self) -> Room | None:
        """A request's room; None: any number of tokens."""
        if self.most_tokens is None:
            return None
        return Room(self.most_tokens, min(self.most_tokens, max(self.most_tokens // self.most, _LEAST_SHARE)))

    @property
    def usage(self) -> float:
        """The taken share of the room, 0 to 1: of tokens, or of turns if any number of tokens fits."""
        if self.most_tokens is None:
            return len(self.running) / self.most
        return sum(place.tokens for place in self.running) / self.most_tokens

    def _go_on(self) -> None:
        """Let the first of those that wait run, while there is room."""
        while True:
            with self._lock:
                place, now = next((one for one in self._places if one.is_waiting), None), time.monotonic()
                if place is None or not self._fits(self.running, place.tokens):
                    return
                if place.runs_since is not None:  # a signal handler's call was faster
                    continue
                place.runs_since = now
            place.tell()

    def _fits(self, beside: Sequence[Place], tokens: int) -> bool:
        room = self.most_tokens is None or sum(place.tokens for place in beside) + tokens <= self.most_tokens
        return room and len(beside) < self.most
