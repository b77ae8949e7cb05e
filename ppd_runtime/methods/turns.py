"""Whose request is served: so many at once, first come, first served."""

import threading
import time
from collections import deque

_TURN_DEADLINE_S = 3600.0
MOST_WAITING = 1024
"""Calls that wait for their turn."""


class Turns:
    """Room for `most` requests at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._changed = threading.Condition()
        self._holders: list[int] = []
        self._queue: deque[object] = deque()

    def check_own(self) -> None:
        """Raise RuntimeError where all turns are this thread's own: it would wait for itself."""
        if self._holders.count(threading.get_ident()) == self.most:
            others = "another stream" if self.most == 1 else f"{self.most} other streams"
            is_open = "is" if self.most == 1 else "are"
            raise RuntimeError(f"{others} of this runtime {is_open} open in this thread: exhaust or close one first")

    def take(self) -> int:
        """Wait for a turn; gives what `give_back` takes.

        Raises:
            RuntimeError: all turns are this thread's own, or too many wait.
            TimeoutError: others have held them for too long.
        """
        deadline, ticket, thread = time.monotonic() + _TURN_DEADLINE_S, object(), threading.get_ident()
        self.check_own()
        with self._changed:
            if len(self._queue) >= MOST_WAITING:
                raise RuntimeError(f"{MOST_WAITING} calls wait for this runtime: try again later")
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or len(self._holders) == self.most:
                    if (left := deadline - time.monotonic()) <= 0:
                        raise TimeoutError(f"other calls have held this runtime for {_TURN_DEADLINE_S:.0f} s")
                    self._changed.wait(left)
                self._holders.append(thread)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        return thread

    def give_back(self, holder: int) -> None:
        """The turn is over."""
        with self._changed:
            self._holders.remove(holder)
            self._changed.notify_all()
