"""Runs state machines in one thread, in an order drawn from a seed: no clock, no sockets, every run repeatable."""

import random
from collections import deque
from collections.abc import Callable, Sequence

from ppd_runtime.pipeline.messages import Message
from ppd_runtime.pipeline.ports import Machine, WaitFor, next_wait
from ppd_runtime.settings.layouts import CLIENT


class MachineNetwork:
    """Delivers messages between machines, one step of one machine at a time.

    Without a seed the order is fair: sub-processes come first, so that what they can deliver in time is there in time.
    A wait with patience runs out only when no other can move, or, with `impatience`, at random: then stragglers,
    late winners and recomputed entries are part of the run.
    """

    def __init__(self, seed: int | None, impatience: float = 0.0) -> None:
        self._fair, self._random, self._impatience = seed is None, random.Random(seed), impatience
        self._machines: dict[int, Machine] = {}
        self._waits: dict[int, WaitFor | None] = {}
        self._inboxes: dict[int, deque[Message]] = {CLIENT: deque()}
        self.sent: list[tuple[int, Message]] = []
        self.arriving: Callable[[int, Message], list[Message]] = lambda address, message: [message]
        """What arrives at an address in place of a message."""
        self.plan: dict[int, Callable[[], None]] = {}
        """What happens before which step."""

    def add(self, address: int, machine: Machine) -> None:
        """Let a machine take part; it starts with its first step."""
        self._machines[address] = machine
        self._inboxes[address] = deque()
        self._waits[address] = None

    def replace(self, address: int, machine: Machine) -> None:
        """Another machine takes the place of one, at once; what has arrived is still there."""
        arrived = self._inboxes[address]
        self.add(address, machine)
        self._inboxes[address] = arrived
        self._step(address, None)

    def deliver(self, address: int, messages: Sequence[Message]) -> None:
        """Have messages arrive before all others."""
        self._inboxes[address].extendleft(reversed(messages))

    def send(self, addresses: Sequence[int], message: Message) -> None:
        """What the machines are given as their `send`."""
        for address in addresses:
            self.sent.append((address, message))
            self._inboxes[address].extend(self.arriving(address, message))

    def run(self, most_steps: int = 1_000_000, end: int | None = None) -> None:
        """Run all machines to their ends, or one of them to its end."""
        for address in list(self._machines):
            self._step(address, None)
        for step in range(most_steps):
            if not self._machines or (end is not None and end not in self._machines):
                return
            if step in self.plan:
                self.plan[step]()
            ready = [address for address in self._machines if self._grantable(address)]
            timed = [a for a, wanted in self._waits.items() if wanted and wanted.patience and not self._inboxes[a]]
            if timed and (not ready or self._random.random() < self._impatience):
                self._step(self._random.choice(timed), None)
                continue
            assert ready, f"every machine waits for ever: {self._waits}"
            self._grant(max(ready) if self._fair else self._random.choice(ready))
        raise AssertionError(f"no end after {most_steps} steps")

    def _grantable(self, address: int) -> bool:
        wanted = self._waits[address]
        return bool(self._inboxes[address]) or (wanted is not None and wanted.patience == 0)

    def _grant(self, address: int) -> None:
        inbox = self._inboxes[address]
        self._step(address, inbox.popleft() if inbox else None)

    def _step(self, address: int, reply: Message | None) -> None:
        try:
            self._waits[address] = next_wait(self._machines[address], reply)
        except StopIteration:
            del self._machines[address], self._waits[address]
