"""Ways for messages to travel: threads' queues, Unix sockets, ZeroMQ sockets over ipc or, encrypted, over TCP."""

from typing import Protocol

from ppd_runtime.pipeline.messages import Message


class Endpoint(Protocol):
    """One worker's or the client's place in the network of a runtime."""

    location: str
    """Where others reach it, such as tcp://10.0.0.2:40123; empty if its address alone says it."""

    def introduce(self, address: int, location: str) -> None:
        """A peer is now there, as a new incarnation: what waited for its last one is dropped."""

    def send(self, address: int, message: Message) -> None:
        """Deliver a message; never blocks, and drops it if its address has not listened for long.

        What cannot leave at once leaves during later calls.
        """

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds (0: only what is there; None: wait for ever).

        What is no message is logged and dropped, or becomes an `Unreadable` if it says whose it is.
        """

    def close(self) -> None:
        """Release what the endpoint holds; what was sent has a moment to be delivered."""
