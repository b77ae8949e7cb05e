"""Messages between processes of one host: ZeroMQ PUSH and PULL sockets over ipc, in a folder of the user's own."""

import logging
import time
from pathlib import Path

import zmq

from ppd_runtime.pipeline.messages import CLIENT, Message, WireError, decode, encode

logger = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # messages to a peer that does not take them, before newer ones are dropped
_LINGER_MS = 500
_MOST_FRAME_BYTES = 2**31


class ZmqEndpoint:
    """One process' place: a socket to receive at, bound in `folder`, and one to each peer it has written to.

    Not to be shared between threads.
    """

    def __init__(self, folder: str, address: int) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MOST_FRAME_BYTES)
        self._path = _path(folder, address)
        self._inbox.bind(f"ipc://{self._path}")
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._last: tuple[Message, list[bytes | memoryview]] | None = None

    def send(self, address: int, message: Message) -> None:
        """Hand the message to ZeroMQ; the same message to the next address is not encoded again."""
        if self._last is None or self._last[0] is not message:
            self._last = (message, encode(message))
        peer = self._peers.get(address) or self._connect(address)
        try:
            peer.send_multipart(self._last[1], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("peer %d takes no messages: dropped a %s", address, type(message).__name__)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds; what is no message is logged and left out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if not self._has_message() and (timeout == 0 or not self._wait(deadline)):
                return None
            try:
                return decode(self._inbox.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                continue
            except WireError as error:
                logger.warning("dropped what arrived: %s", error)

    def _has_message(self) -> bool:
        return bool(int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN)  # far cheaper than a poll or a vain receive

    def _wait(self, deadline: float | None) -> bool:
        left_ms = None if deadline is None else max(0, round((deadline - time.monotonic()) * 1000))
        return bool(self._inbox.poll(left_ms))

    def close(self) -> None:
        """Close the sockets and remove the inbox' file; what was sent has half a second to leave."""
        self._context.destroy(linger=_LINGER_MS)
        self._path.unlink(missing_ok=True)

    def _connect(self, address: int) -> "zmq.Socket[bytes]":
        peer = self._context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        peer.connect(f"ipc://{_path(self._folder, address)}")
        self._peers[address] = peer
        return peer


def _path(folder: str, address: int) -> Path:
    return Path(folder) / ("client" if address == CLIENT else f"worker-{address}")
