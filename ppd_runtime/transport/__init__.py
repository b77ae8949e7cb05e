"""Ways for messages to travel: threads' queues, Unix sockets, ZeroMQ sockets."""

from typing import Protocol

from ppd_runtime.pipeline.messages import Message


class Endpoint(Protocol):
    """One worker's or the client's place in the network of a runtime."""

    def send(self, address: int, message: Message) -> None:
        """Deliver a message; never blocks, and drops it where nobody has listened for long.

        What cannot leave at once leaves during later calls.
        """

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds (0: only what is there; None: wait for ever)."""

    def close(self) -> None:
        """Release what the endpoint holds; what was sent has a moment to be delivered."""
