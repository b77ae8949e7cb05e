"""The client's place in the network, shared by calls in several threads: each gets the messages of its own request."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ppd_runtime.launch.base import Workers
from ppd_runtime.pipeline.messages import Failed, Message
from ppd_runtime.settings.layouts import DECIDER

_SLICE_S = 0.02  # how long a call listens before others may send


class MessageExchange:
    """Sockets allow one thread at a time. So one of the calls that wait for a message listens for all of them.

    A call that hears its own message leaves, and another listens from then on. A lone call always listens itself.
    """

    def __init__(self, workers: Workers) -> None:
        self._endpoint, self.supervisor = workers.endpoint, workers.supervisor
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._user: int | None = None  # the thread that uses the endpoint
        self._wanting = 0  # threads that wait to use it for a moment
        self._inboxes: dict[int, deque[Message]] = {}
        self._waiting: dict[int, threading.Condition] = {}
        """The requests whose calls wait while another listens."""
        self.heard_at = 0.0
        """The time of the main process' last message, on the monotonic clock."""

    def open(self, request: int) -> None:
        """Keep the request's messages from now on."""
        with self._lock:
            self._inboxes[request] = deque()

    def close(self, request: int) -> None:
        """Drop the request's messages from now on."""
        with self._lock:
            self._inboxes.pop(request, None)

    def send(self, address: int, message: Message) -> None:
        """Send a message."""
        with self._alone():
            self._endpoint.send(address, message)

    def check(self) -> None:
        """Have the supervisor check the workers; messages that arrived are read before it reports a loss."""
        with self._alone():
            self.supervisor.check(self._hear)

    def unwell(self) -> list[str]:
        """Names of needed workers that do not serve, after a `check`."""
        with self._alone():
            self.supervisor.check(self._hear)
            return self.supervisor.unwell()

    def receive(self, request: int, timeout: float) -> Message | None:
        """The request's next message, or None after `timeout`."""
        deadline = time.monotonic() + timeout
        with self._lock:
            inbox = self._inboxes[request]
            while not inbox:
                left = deadline - time.monotonic()
                if not self._is_mine() or self._wanting:
                    if left <= 0:
                        return None
                    self._wait_for_others(request, min(left, _SLICE_S))
                elif not self._listen(max(min(left, _SLICE_S), 0)) and time.monotonic() >= deadline:
                    return None
            return inbox.popleft()

    def _wait_for_others(self, request: int, seconds: float) -> None:
        turn = self._waiting[request] = threading.Condition(self._lock)
        turn.wait(seconds)
        self._waiting.pop(request, None)

    def _listen(self, seconds: float) -> bool:
        """Receive one message for any request; the lock is free meanwhile."""
        before, self._user = self._user, threading.get_ident()
        self._lock.release()
        try:
            message = self._endpoint.receive(seconds)
        finally:
            self._lock.acquire()
            self._release(before)
        if message is not None:
            self._put(message)
        return message is not None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Use the endpoint alone, once a call that listens has ended its slice."""
        with self._lock:
            self._wanting += 1
            try:
                while not self._is_mine():
                    self._free.wait(_SLICE_S)
                before, self._user = self._user, threading.get_ident()
            finally:
                self._wanting -= 1
        try:
            yield
        finally:
            with self._lock:
                self._release(before)

    def _is_mine(self) -> bool:
        """Whether this thread may use the endpoint; it may do so twice, as a dropped call may end in another."""
        return self._user in (None, threading.get_ident())

    def _release(self, user: int | None) -> None:
        """Let a waiting sender go on, or else another call listen."""
        self._user = user
        if self._wanting:
            self._free.notify()
        elif self._waiting:
            next(iter(self._waiting.values())).notify()

    def _hear(self) -> None:
        """Receive all messages that have arrived."""
        while (message := self._endpoint.receive(0)) is not None:
            with self._lock:
                self._put(message)

    def _put(self, message: Message) -> None:
        """Put a message into its request's inbox; an ending worker's error goes to the supervisor at once."""
        if isinstance(message, Failed):
            self.supervisor.note_words(message.sender, message.error)
            return
        if message.sender == DECIDER:
            self.heard_at = time.monotonic()
        if (inbox := self._inboxes.get(message.request)) is not None:
            inbox.append(message)
            if turn := self._waiting.get(message.request):
                turn.notify()
