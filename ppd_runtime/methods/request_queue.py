"""A first-come, first-served queue that limits running requests and their total tokens."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_TURN_DEADLINE_S = 3600.0
_LOOK_EVERY_S = 0.25
MOST_WAITING = 1024
"""Most calls that may wait."""
_LEAST_SHARE = 1024  # tokens of a request; without room for that, fewer run at once


class Room(NamedTuple):
    """Tokens that one request may have, prompt included."""

    most: int
    """The most, if others wait."""
    share: int
    """The share if as many run at once as may; at least 1024, up to `most`."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A request's turn, taken by a thread."""

    thread: int
    tokens: int
    """Prompt tokens and those it may get."""


class RequestQueue:
    """Room for `most` requests at once, and for `most_tokens` tokens in all; None: any number of tokens."""

    def __init__(self, most: int, most_tokens: int | None = None) -> None:
        self.most, self.most_tokens = most, most_tokens
        self._changed = threading.Condition()
        self._taken: list[Turn] = []
        self._queue: deque[object] = deque()

    def check_own(self, tokens: int = 0) -> None:
        """Raise RuntimeError if this thread's own turns leave no room for a request: it would wait for itself."""
        own = [turn for turn in self._taken if turn.thread == threading.get_ident()]
        if own and not self._fits(own, tokens):
            others = "another stream" if len(own) == 1 else f"{len(own)} other streams"
            are = "is" if len(own) == 1 else "are"
            raise RuntimeError(f"{others} of this runtime {are} open in this thread: exhaust or close one first")

    def take(self, tokens: int = 0, is_over: Callable[[], object] = lambda: None) -> Turn | None:
        """Wait for a turn of a request of `tokens` tokens, at most `most_tokens`; `give_back` ends the turn.

        None if `is_over` says meanwhile that nobody wants it.

        Raises:
            RuntimeError: this thread would wait for itself, or too many wait.
            TimeoutError: others have held theirs for too long.
        """
        deadline, turn = time.monotonic() + _TURN_DEADLINE_S, Turn(threading.get_ident(), tokens)
        self.check_own(tokens)
        with self._changed:
            if len(self._queue) >= MOST_WAITING:
                raise RuntimeError(f"{MOST_WAITING} calls wait for this runtime: try again later")
            self._queue.append(turn)
            try:
                while self._queue[0] is not turn or not self._fits(self._taken, tokens):
                    if (left := deadline - time.monotonic()) <= 0:
                        raise TimeoutError(f"other calls have held this runtime for {_TURN_DEADLINE_S:.0f} s")
                    if is_over():
                        return None
                    self._changed.wait(min(left, _LOOK_EVERY_S))
                self._taken.append(turn)
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()
        return turn

    def give_back(self, turn: Turn) -> None:
        """End the turn."""
        with self._changed:
            self._taken.remove(turn)
            self._changed.notify_all()

    @property
    def room(self) -> Room | None:
        """A request's room; None: any number of tokens."""
        if self.most_tokens is None:
            return None
        return Room(self.most_tokens, min(self.most_tokens, max(self.most_tokens // self.most, _LEAST_SHARE)))

    @property
    def usage(self) -> float:
        """The taken share of the room, 0 to 1: of tokens, or of turns if any number of tokens fits."""
        with self._changed:
            if self.most_tokens is None:
                return len(self._taken) / self.most
            return sum(turn.tokens for turn in self._taken) / self.most_tokens

    def _fits(self, beside: list[Turn], tokens: int) -> bool:
        room = self.most_tokens is None or sum(turn.tokens for turn in beside) + tokens <= self.most_tokens
        return room and len(beside) < self.most
