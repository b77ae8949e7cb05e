"""When workers may be closed: between two steps of a call and never within one, whichever thread asks for it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ppd_runtime.launch.base import Workers
from ppd_runtime.launch.supervisor import CLOSED

Item = TypeVar("Item")
_LOOK_EVERY_S = 1.0


class ShutdownGuard:
    """Closes workers once, in the process that started them.

    A thread that closes waits for the steps of calls, which hear of it within a fraction of a second. If a signal
    handler closes in the middle of a step, the last step closes at its end.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._owner = workers, os.getpid()
        self._idle = threading.Condition(threading.RLock())
        self._inside: list[int] = []
        """The threads in a step, and one that closes."""
        self._asked = self._done = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A part of a call that uses the workers.

        Raises:
            RuntimeError: they are closed, or another process'.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(f"the runtime is process {self._owner}'s, of which this one is a fork: make one here")
        thread = threading.get_ident()
        self._inside.append(thread)
        try:
            if self._asked:
                raise RuntimeError(CLOSED)
            yield
        finally:
            with self._idle:
                self._inside.remove(thread)
                if self._asked and not self._inside:
                    self._close()

    def each(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items, each made in a step of its own."""
        while True:
            with self.step():
                item = next(items, None)
            if item is None:
                return
            yield item

    def close(self) -> None:
        """Close the workers; a second call does nothing, nor does one in a fork, which does not own them."""
        if os.getpid() != self._owner:
            return
        self._asked = True
        self._workers.supervisor.dismiss()
        with self._idle:
            if threading.get_ident() not in self._inside:
                while self._inside:
                    self._idle.wait(_LOOK_EVERY_S)
                self._close()

    def _close(self) -> None:
        if not self._done:
            self._done = True
            self._inside.append(threading.get_ident())
            try:
                self._workers.close()
            finally:
                self._inside.remove(threading.get_ident())
                self._idle.notify_all()
