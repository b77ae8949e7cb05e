"""The two ends of a Unix stream that carries messages one way.

On the stream a message is a prefix with two lengths, then its header and its tensor's bytes, or their position in the
stream's ring (`ring`).
"""

import logging
import select
import socket
import struct
import time
from array import array
from collections import deque
from pathlib import Path

from torch import Tensor

from ppd_runtime.pipeline.messages import Message
from ppd_runtime.pipeline.tensors import Frame
from ppd_runtime.pipeline.wire import WireError, received
from ppd_runtime.transport.ring import RingReader, RingWriter

logger = logging.getLogger(__name__)
_PREFIX = struct.Struct("<4sIQ")
_MAGIC, _IN_RING = b"ppd1", b"ppdr"
_PLACE = struct.Struct("<Q")
_DESCRIPTOR_BYTES = 4
_MOST_HEADER_BYTES = 16 * 2**20
_MOST_TENSOR_BYTES = 2**31
FIRST_BUFFER_BYTES = 2**16
"""Of an inlet."""
_KERNEL_BUFFER_BYTES = 4 * 2**20  # asked for; the system may grant less
_MOST_WAITING = 10_000  # messages to a peer that does not take them, before newer ones are dropped …
_MOST_WAITING_BYTES = 64 * 2**20  # … or so many bytes
RETRY_S = 0.01
"""Between two attempts to reach a peer."""


class Inlet:
    """The receiving end of one peer's stream, and of its ring if it has one."""

    def __init__(self, connection: socket.socket, device: str = "cpu") -> None:
        self._connection, self._device = connection, device
        self._ring: RingReader | None = None
        self._has_begun = False
        self._buffer = memoryview(bytearray(FIRST_BUFFER_BYTES))
        self._begin = self._end = 0

    def read(self, arrived: deque[Message]) -> bool:
        """Append the messages that are there; False once the stream has ended or holds invalid bytes."""
        if self._ring:
            self._ring.release()
        try:
            while True:
                free = self._buffer[self._end :] if self._end else self._buffer
                size = self._connection.recv_into(free) if self._has_begun else self._read_first(free)
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
        """Close the connection and the ring."""
        self._connection.close()
        if self._ring:
            self._ring.close()
            self._ring = None

    def _read_first(self, free: memoryview) -> int:
        """Read as `recv_into` does; the first bytes may bring the descriptor of a ring."""
        room, flags = socket.CMSG_LEN(_DESCRIPTOR_BYTES), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        size, told, _, _ = self._connection.recvmsg_into([free], room, flags)
        self._has_begun = True
        for level, kind, number in told:
            if (level, kind, len(number)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR_BYTES):
                (descriptor,) = array("i", number)
                self._ring = RingReader(descriptor, self._device)
        return size

    def _decode(self, arrived: deque[Message]) -> None:
        while (held := self._end - self._begin) >= _PREFIX.size:
            magic, header_size, tensor_size = _PREFIX.unpack_from(self._buffer, self._begin)
            if magic not in (_MAGIC, _IN_RING) or header_size > _MOST_HEADER_BYTES or tensor_size > _MOST_TENSOR_BYTES:
                raise WireError("not a message's prefix")
            size = _PREFIX.size + header_size + (tensor_size if magic == _MAGIC else _PLACE.size)
            if held < size:
                self._make_room(size)
                return
            header = self._begin + _PREFIX.size
            tensor = header + header_size
            self._begin += size
            frames: list[memoryview | Tensor] = [self._buffer[header:tensor], self._buffer[tensor : self._begin]]
            if magic == _IN_RING:
                (position,) = _PLACE.unpack_from(self._buffer, tensor)
                frames[1] = self._take(position, tensor_size)
            if message := received(frames if tensor_size else frames[:1]):
                arrived.append(message)
        if self._begin == self._end:
            self._begin = self._end = 0
        else:
            self._make_room(_PREFIX.size)

    def _take(self, position: int, num_bytes: int) -> Tensor:
        if self._ring is None:
            raise WireError("a tensor's place in a ring, of a stream that has none")
        return self._ring.take(position, num_bytes)

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


class Outlet:
    """The sending end of a stream to one peer, what the peer has not taken yet, and the stream's ring if it has one."""

    def __init__(self, path: Path, drain_ms: int, has_ring: bool = False) -> None:
        self._path, self._drain_ms, self._has_ring = str(path), drain_ms, has_ring
        self._socket: socket.socket | None = None
        self._ring: RingWriter | None = None
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

    def write_by_ring(self, header: bytes, raw: Tensor) -> bool:
        """Send a message whose tensor's bytes go through the ring; False if that is not possible now.

        A place in the ring never waits in the queue, because a message may outlive its stream there, and the ring.
        """
        if self._queue or self._socket is None:
            self.flush()
        if self._queue or self._ring is None:
            return False
        try:
            position = self._ring.put(raw)
        except WireError as error:
            logger.warning("left a ring: %s", error)
            self._leave_ring()
            return False
        if position is None:
            return False
        notice = _PREFIX.pack(_IN_RING, len(header), len(raw)) + header + _PLACE.pack(position)
        sent = self._send([notice])
        if not sent:
            return False
        self._ring.keep()
        if sent < len(notice):  # a broken stream takes the rest with it
            self._enqueue(notice)
            self._sent = sent
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
            if self._ring is None or self._ring.descriptor < 0:
                return self._socket.sendmsg(chunks)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self._ring.descriptor]))
            sent = self._socket.sendmsg(chunks, [rights])
            self._ring.passed()
            return sent
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
            self._retry_at = time.monotonic() + RETRY_S
            return False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        self._socket = connection
        if self._has_ring:
            try:
                self._ring = RingWriter()
            except OSError as error:
                logger.warning("no shared memory for tensors, which go with their messages: %s", error.strerror)
        return True

    def _leave_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = None

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._leave_ring()
        if self._sent:  # the rest of a broken message is of no use to the next listener
            self._forget_first()

    def _forget_first(self) -> None:
        self._queued_bytes -= len(self._queue.popleft())
        self._sent = 0


def with_prefix(header: Frame, tensor: Frame = b"") -> list[Frame]:
    """A message's frames as they go into a stream."""
    prefix = _PREFIX.pack(_MAGIC, len(header), len(tensor))
    return [prefix + header, tensor] if tensor else [prefix + header]
