"""Messages between processes of one host: ZeroMQ PUSH and PULL sockets over ipc, in a folder of the user's own."""

import logging
from pathlib import Path

import zmq

from ppd_runtime.pipeline.messages import CLIENT, Message, WireError, decode, encode

logger = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # messages to a peer that does not take them, before newer ones are dropped
_LINGER_MS = 500


class ZmqEndpoint:
    """One process' place: a socket to receive at, bound in `folder`, and one to each peer it has written to.

    Not to be shared between threads.
    """

    def __init__(self, folder: str, address: int) -> None:
        self._folder = folder
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(_url(folder, address))
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
        while True:
            if timeout != 0 and not self._inbox.poll(None if timeout is None else max(1, round(timeout * 1000))):
                return None
            try:
                return decode(self._inbox.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except WireError as error:
                logger.warning("dropped what arrived: %s", error)

    def close(self) -> None:
        """Close the sockets; what was sent has half a second to leave."""
        self._context.destroy(linger=_LINGER_MS)

    def _connect(self, address: int) -> "zmq.Socket[bytes]":
        peer = self._context.socket(zmq.PUSH)
        peer.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        peer.connect(_url(self._folder, address))
        self._peers[address] = peer
        return peer


def _url(folder: str, address: int) -> str:
    name = "client" if address == CLIENT else f"worker-{address}"
    return f"ipc://{Path(folder) / name}"
