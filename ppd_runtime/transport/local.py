"""Messages between threads of one process: a queue for each address, nothing copied."""

from queue import Empty, SimpleQueue

from ppd_runtime.pipeline.messages import Message


class LocalNetwork:
    """The queues of one runtime."""

    def __init__(self, addresses: list[int]) -> None:
        self._queues: dict[int, SimpleQueue[Message]] = {address: SimpleQueue() for address in addresses}

    def endpoint(self, address: int) -> "LocalEndpoint":
        """The place of one thread."""
        return LocalEndpoint(self._queues, address)


class LocalEndpoint:
    """One thread's place; see `ppd_runtime.transport.Endpoint`."""

    def __init__(self, queues: "dict[int, SimpleQueue[Message]]", address: int) -> None:
        self._queues, self._inbox = queues, queues[address]
        self.location = ""

    def introduce(self, address: int, location: str) -> None:
        """Nothing to do: a queue stays where it is."""

    def send(self, address: int, message: Message) -> None:
        """Put the message, by reference, into the receiver's queue."""
        self._queues[address].put(message)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, or None after `timeout` seconds."""
        try:
            return self._inbox.get(block=timeout != 0, timeout=timeout)
        except Empty:
            return None

    def close(self) -> None:
        """Nothing to release."""
