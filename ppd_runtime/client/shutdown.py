"""When workers may be closed: between two steps of a call, whoever asks for it, and never under one."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ppd_runtime.launch.base import Workers
from ppd_runtime.launch.supervisor import CLOSED

Item = TypeVar("Item")


class ShutdownGuard:
    """Closes workers once, in the process that started them.

    Sockets bear one thread at a time. So a thread that closes waits for the step that a call is in, which hears of it
    within a fraction of a second; and what a signal handler asks for in the middle of a step, that step does at its
    end.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._owner = workers, os.getpid()
        self._lock = threading.RLock()
        self._thread: int | None = None
        """Who is in a step, or closes."""
        self._asked = self._done = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A part of a call that uses the workers.

        Raises:
            RuntimeError: they are closed, or another process'.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(f"the runtime is process {self._owner}'s, of which this one is a fork: make one here")
        with self._lock:
            if self._asked:
                raise RuntimeError(CLOSED)
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None
                if self._asked:
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
        """Close the workers; a second call does nothing, and neither does one in a fork, whose they are not."""
        if os.getpid() != self._owner:
            return
        self._asked = True
        self._workers.supervisor.dismiss()
        if self._thread != threading.get_ident():
            with self._lock:
                self._close()

    def _close(self) -> None:
        if not self._done:
            self._done, self._thread = True, threading.get_ident()
            self._workers.close()
