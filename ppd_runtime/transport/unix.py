"""Messages between processes of one host: Unix stream sockets, in a folder of the user's own, without threads.

A hop costs two system calls and a wake-up, a fraction of ZeroMQ's, whose own threads relay each message at both ends.
"""

import contextlib
import logging
import select
import socket
import time
from collections import deque

from torch import Tensor

from ppd_runtime.pipeline.messages import Entries, Message
from ppd_runtime.pipeline.tensors import Frame
from ppd_runtime.pipeline.wire import encode, split, tensor_bytes
from ppd_runtime.transport.network import socket_path
from ppd_runtime.transport.ring import can_share
from ppd_runtime.transport.streams import RETRY_S, Inlet, Outlet, with_prefix

logger = logging.getLogger(__name__)
_DRAIN_MS = 50  # how long a send waits for a full pipe to move: a long prompt should not stay behind a long pass
_LINGER_S = 0.5
_MOST_PAUSE = 63  # waits; each spin in vain about doubles those that sleep at once


class UnixEndpoint:
    """One process' place: a socket that listens in `folder`, and a stream to each peer it has written to.

    Key/value entries have a stream of their own, so that a hidden state never queues behind them. A wait begins with
    `spin_s` seconds of polling, which is quicker than being woken; for processes with a core of their own. If messages
    come later than that, most waits sleep at once. Not to be shared between threads.

    Tensors of `ring_from` bytes and more go through shared memory while there is room (None: none do). Those that come
    in this way are copied to `device`.
    """

    def __init__(
        self, folder: str, address: int, spin_s: float = 0.0, ring_from: int | None = None, device: str = "cpu"
    ) -> None:
        self._folder, self._spin_s, self._device = folder, spin_s, device
        self._ring_from = ring_from if can_share() else None
        self._path = socket_path(folder, address)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._inlets: dict[int, Inlet] = {}
        self._outlets: dict[tuple[int, bool], Outlet] = {}
        self._waiting: set[Outlet] = set()
        self._arrived: deque[Message] = deque()
        self._last: tuple[Message, list[Frame]] | None = None
        self._last_split: tuple[Message, bytes, Tensor] | None = None
        self._pause = self._asleep = 0  # waits without spinning: after the next spin in vain, and still to come
        self.location = ""

    def introduce(self, address: int, location: str) -> None:
        """A new peer listens at the address: what waited for the last one is dropped."""
        for bulk in (False, True):
            if old := self._outlets.pop((address, bulk), None):
                self._waiting.discard(old)
                old.close()

    def send(self, address: int, message: Message) -> None:
        """Write the message into the peer's stream; the same message to the next address is not encoded again."""
        bulk = type(message) is Entries
        outlet = self._outlets.get((address, bulk)) or self._new_outlet(address, bulk)
        if self._ring_from is None or not self._write_by_ring(outlet, message, self._ring_from):
            if self._last is None or self._last[0] is not message:
                self._last = (message, with_prefix(*encode(message)))
            if not outlet.write(self._last[1]):
                logger.warning("peer %d takes no messages: dropped a %s", address, type(message).__name__)
        if outlet.waiting:
            self._waiting.add(outlet)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds."""
        if self._arrived:
            return self._arrived.popleft()
        self._take(0)
        if self._arrived or timeout == 0:
            return self._arrived.popleft() if self._arrived else None
        now = time.perf_counter()
        deadline = None if timeout is None else now + timeout
        self._spin(now + self._spin_s if deadline is None else min(now + self._spin_s, deadline))
        while not self._arrived:
            left = None if deadline is None else deadline - time.perf_counter()
            if left is not None and left <= 0:
                return None
            self._take(self._patience_ms(left))
        return self._arrived.popleft()

    def close(self) -> None:
        """Close the sockets and remove the listener's file; what was sent has half a second to leave."""
        deadline = time.monotonic() + _LINGER_S
        while self._waiting and time.monotonic() < deadline:
            self._flush()
            time.sleep(RETRY_S / 10)
        if self._listener.fileno() >= 0:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for inlet in self._inlets.values():
            inlet.close()
        for outlet in self._outlets.values():
            outlet.close()
        self._waiting.clear()

    def _new_outlet(self, address: int, bulk: bool) -> Outlet:
        path, has_ring = socket_path(self._folder, address), self._ring_from is not None
        outlet = self._outlets[address, bulk] = Outlet(path, 0 if bulk else _DRAIN_MS, has_ring)
        return outlet

    def _write_by_ring(self, outlet: Outlet, message: Message, ring_from: int) -> bool:
        """Send a message whose tensor is large enough for the ring; False if it has to go as a whole."""
        if tensor_bytes(message) < max(ring_from, 1):
            return False
        if self._last_split is None or self._last_split[0] is not message:
            header, raw = split(message)
            assert raw is not None
            self._last_split = (message, header, raw)
        return outlet.write_by_ring(*self._last_split[1:])

    def _spin(self, until: float) -> None:
        """Look for a message again and again, unless that was in vain lately."""
        if self._asleep:
            self._asleep -= 1
            return
        while not self._arrived and time.perf_counter() < until:
            self._take(0)
        self._pause = 0 if self._arrived else min(2 * self._pause + 1, _MOST_PAUSE)
        self._asleep = self._pause

    def _patience_ms(self, left: float | None) -> int | None:
        """How long to sleep: to the deadline, rounded up, or until what could not be written is tried again."""
        if self._waiting:
            left = RETRY_S if left is None else min(left, RETRY_S)
        return None if left is None else int(left * 1000) + 1

    def _take(self, timeout_ms: int | None) -> None:
        """Collect every whole message that is there, or comes first within the timeout."""
        if self._waiting:
            self._flush()
        for number, _ in self._poll.poll(timeout_ms):
            inlet = self._inlets.get(number)
            if inlet is None:
                self._accept()
            elif not inlet.read(self._arrived):
                self._poll.unregister(number)
                self._inlets.pop(number).close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._inlets[connection.fileno()] = Inlet(connection, self._device)

    def _flush(self) -> None:
        for outlet in list(self._waiting):
            outlet.flush()
            if not outlet.waiting:
                self._waiting.discard(outlet)
