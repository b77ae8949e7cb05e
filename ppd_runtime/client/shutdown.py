"""Closes workers between two steps of a call and never within one, whichever thread asks for it."""

import os
import threading

from ppd_runtime.launch.base import Workers
from ppd_runtime.launch.supervisor import CLOSED

_LOOK_EVERY_S = 1.0


class ShutdownGuard:
    """Closes workers once, in the process that started them; a call enters it for each step that uses them.

    A thread that closes waits for the steps of calls, which hear of it within a fraction of a second. If a signal
    handler closes in the middle of a step, the last step closes at its end.

    Raises:
        RuntimeError: on entering, if the workers are closed or belong to another process.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._owner = workers, os.getpid()
        self._idle = threading.Condition(threading.RLock())
        self._inside: list[int] = []
        """The threads that are in a step, and the thread that closes."""
        self._asked = self._done = False

    def __enter__(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(f"the runtime is process {self._owner}'s, of which this one is a fork: make one here")
        self._inside.append(threading.get_ident())
        if self._asked:
            self.__exit__()
            raise RuntimeError(CLOSED)

    def __exit__(self, *_: object) -> None:
        with self._idle:
            self._inside.remove(threading.get_ident())
            if self._asked and not self._inside:
                self._close()

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
