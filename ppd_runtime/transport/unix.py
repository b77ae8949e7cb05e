"""Messages between processes of one host: Unix stream sockets, in a folder of the user's own, without threads.

A hop costs two system calls and a wake-up, a fraction of ZeroMQ's, whose own threads relay each message at both ends.
On the stream a message is a prefix with two lengths, then its header and its tensor's bytes.
"""

import contextlib
import logging
import select
import socket
import struct
import time
from collections import deque
from pathlib import Path

from ppd_runtime.pipeline.messages import Entries, Message
from ppd_runtime.pipeline.tensors import Frame
from ppd_runtime.pipeline.wire import WireError, encode, received
from ppd_runtime.transport.network import socket_path

logger = logging.getLogger(__name__)
_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"ppd1"
_MOST_HEADER_BYTES = 16 * 2**20
_MOST_TENSOR_BYTES = 2**31
_FIRST_BUFFER_BYTES = 2**16
_KERNEL_BUFFER_BYTES = 4 * 2**20  # asked for; the system may grant less
_MOST_WAITING = 10_000  # messages to a peer that does not take them, before newer ones are dropped …
_MOST_WAITING_BYTES = 64 * 2**20  # … or so many bytes
_DRAIN_MS = 50  # how long a send waits for a full pipe to move: a long prompt should not stay behind a long pass
_RETRY_S = 0.01
_LINGER_S = 0.5
_MOST_PAUSE = 63  # waits; each spin in vain about doubles those that sleep at once


class UnixEndpoint:
    """One process' place: a socket that listens in `folder`, and a stream to each peer it has written to.

    Key/value entries have a stream of their own, so that a hidden state never queues behind them. A wait begins with
    `spin_s` seconds of polling, which is quicker than being woken; for processes with a core of their own. If messages
    come later than that, most waits sleep at once. Not to be shared between threads.
    """

    def __init__(self, folder: str, address: int, spin_s: float = 0.0) -> None:
        self._folder, self._spin_s = folder, spin_s
        self._path = socket_path(folder, address)
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._inlets: dict[int, _Inlet] = {}
        self._outlets: dict[tuple[int, bool], _Outlet] = {}
        self._waiting: set[_Outlet] = set()
        self._arrived: deque[Message] = deque()
        self._last: tuple[Message, list[Frame]] | None = None
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
        if self._last is None or self._last[0] is not message:
            self._last = (message, _with_prefix(*encode(message)))
        bulk = type(message) is Entries
        outlet = self._outlets.get((address, bulk)) or self._new_outlet(address, bulk)
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
            time.sleep(_RETRY_S / 10)
        if self._listener.fileno() >= 0:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        for inlet in self._inlets.values():
            inlet.close()
        for outlet in self._outlets.values():
            outlet.close()
        self._waiting.clear()

    def _new_outlet(self, address: int, bulk: bool) -> "_Outlet":
        outlet = self._outlets[address, bulk] = _Outlet(socket_path(self._folder, address), 0 if bulk else _DRAIN_MS)
        return outlet

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
            left = _RETRY_S if left is None else min(left, _RETRY_S)
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
            self._inlets[connection.fileno()] = _Inlet(connection)

    def _flush(self) -> None:
        for outlet in list(self._waiting):
            outlet.flush()
            if not outlet.waiting:
                self._waiting.discard(outlet)


class _Inlet:
    """The receiving end of one peer's stream."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        self._begin = self._end = 0

    def read(self, arrived: deque[Message]) -> bool:
        """Append the messages that are there; False once the stream has ended or holds invalid bytes."""
        try:
            while True:
                size = self._connection.recv_into(self._buffer[self._end :] if self._end else self._buffer)
                if not size:
                    return False
                self._end += size
                room = self._end < len(self._buffer)
                self._decode(arrived)
                if room:
                    return True  # the kernel had no more
        except BlockingIOError:
            return True
        except OSError:
            return False
        except WireError as error:
            logger.warning("closed a stream: %s", error)
            return False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _decode(self, arrived: deque[Message]) -> None:
        while (held := self._end - self._begin) >= _PREFIX.size:
            magic, header_size, tensor_size = _PREFIX.unpack_from(self._buffer, self._begin)
            if magic != _MAGIC or header_size > _MOST_HEADER_BYTES or tensor_size > _MOST_TENSOR_BYTES:
                raise WireError("not a message's prefix")
            size = _PREFIX.size + header_size + tensor_size
            if held < size:
                self._make_room(size)
                return
            header = self._begin + _PREFIX.size
            tensor = header + header_size
            self._begin += size
            frames = [self._buffer[header:tensor], self._buffer[tensor : self._begin]]
            if message := received(frames if tensor_size else frames[:1]):
                arrived.append(message)
        if self._begin == self._end:
            self._begin = self._end = 0
        else:
            self._make_room(_PREFIX.size)

    def _make_room(self, size: int) -> None:
        """Room for what is missing of `size` bytes, but no more than doubled: a lying prefix takes no memory."""
        num_held = self._end - self._begin
        if self._begin + size <= len(self._buffer) or 0 == self._begin < num_held < len(self._buffer):
            return
        held = bytes(self._buffer[self._begin : self._end])
        if size > len(self._buffer) == num_held:
            self._buffer = memoryview(bytearray(min(size, 2 * num_held)))
        self._buffer[:num_held] = held
        self._begin, self._end = 0, num_held


class _Outlet:
    """The sending end of a stream to one peer, and what the peer has not taken yet."""

    def __init__(self, path: Path, drain_ms: int) -> None:
        self._path, self._drain_ms = str(path), drain_ms
        self._socket: socket.socket | None = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._sent = 0  # bytes of the queue's first message
        self._retry_at = 0.0

    @property
    def waiting(self) -> bool:
        """Whether something has not left yet."""
        return bool(self._queue)

    def write(self, chunks: list[Frame]) -> bool:
        """Send the chunks of a message, or queue what cannot leave; False if too much is queued already."""
        if self._queue or self._socket is None:
            self.flush()
        if self._queue or self._socket is None:
            return self._enqueue(b"".join(chunks))
        sent = self._send(chunks)
        if sent < sum(map(len, chunks)):
            self._enqueue(b"".join(chunks))
            self._sent = sent
            self._drain()
        return True

    def flush(self) -> None:
        """Send as much of the queue as the peer takes, connecting first if needed."""
        if self._socket is None and not self._connect():
            return
        while self._queue:
            first = self._queue[0]
            sent = self._send([memoryview(first)[self._sent :]])
            if self._socket is None:
                return
            self._sent += sent
            if self._sent < len(first):
                return
            self._forget_first()

    def close(self) -> None:
        """Close the connection; what is queued is lost."""
        self._disconnect()
        self._queue.clear()

    def _enqueue(self, message: bytes) -> bool:
        full = len(self._queue) >= _MOST_WAITING or self._queued_bytes + len(message) > _MOST_WAITING_BYTES
        if full and self._queue:
            return False
        self._queue.append(message)
        self._queued_bytes += len(message)
        return True

    def _drain(self) -> None:
        """Wait for a full pipe as long as it moves: the rest would not be written while this process computes."""
        while self._queue and self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if not poll.poll(self._drain_ms):
                return
            self.flush()

    def _send(self, chunks: list[Frame]) -> int:
        """Bytes that the kernel took; a stream that has broken is closed, and opened again by the next flush."""
        assert self._socket is not None
        try:
            return self._socket.sendmsg(chunks)
        except BlockingIOError:
            return 0
        except OSError:
            self._disconnect()
            return 0

    def _connect(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(self._path)
        except OSError:  # no process listens there, or too many wait to be accepted
            connection.close()
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        self._socket = connection
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        if self._sent:  # the rest of a broken message is of no use to the next listener
            self._forget_first()

    def _forget_first(self) -> None:
        self._queued_bytes -= len(self._queue.popleft())
        self._sent = 0


def _with_prefix(header: Frame, tensor: Frame = b"") -> list[Frame]:
    prefix = _PREFIX.pack(_MAGIC, len(header), len(tensor))
    return [prefix + header, tensor] if tensor else [prefix + header]
