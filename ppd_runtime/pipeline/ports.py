"""What both state machines have in common: how they wait, send and compute."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from ppd_runtime.pipeline.messages import Message
from ppd_runtime.request_error import RequestError


class Work(IntEnum):
    """What a machine does without a message; of several machines in a process, the least value goes first."""

    LITTLE = 0
    """It waits, or decides."""
    NEEDED = 1
    """A pass that is needed: over a certain token, or a prompt."""
    SPECULATION = 2


def _needed() -> Work:
    return Work.NEEDED


@dataclass(slots=True)
class WaitFor:
    """A wait for a message.

    `patience` is counted in one-token layer passes: 0 takes only what is there, None waits as long as it takes.
    Yielding the same wait again continues with its remaining patience.
    """

    patience: int | None
    least_s: float = 0.0
    """The least seconds to wait, whatever a pass takes, with a real clock."""
    deadline: float | None = None
    """Set by what runs the machine, in its own clock."""
    work: Callable[[], Work] = _needed
    """What the machine does if it only looks for a message, in vain."""


class Computation:
    """What a machine asks to have computed; a runner of several machines may compute some together."""

    __slots__ = ()

    def alone(self) -> Any:
        """Compute it."""
        raise NotImplementedError


class Call(Computation):
    """A call of a stage or a head for one machine alone, such as a prompt's chunk."""

    __slots__ = ("_arguments", "_compute")

    def __init__(self, compute: Callable[..., Any], *arguments: Any) -> None:
        self._compute, self._arguments = compute, arguments

    def alone(self) -> Any:
        return self._compute(*self._arguments)


Awaited = WaitFor | Computation
Machine = Generator[Awaited, Any, None]
"""Yields what it awaits and is sent the result: a message, None when patience ran out, or a computation's value."""


def give_result(machine: Machine, computation: Computation) -> Awaited:
    """Compute what a machine asks for, and have it go on; a `RequestError` is raised where it asked."""
    try:
        result = computation.alone()
    except RequestError as error:
        return machine.throw(error)
    return machine.send(result)


def next_wait(machine: Machine, reply: Message | None) -> WaitFor:
    """Send a message or None; compute, one by one, what the machine asks for up to its next wait."""
    awaited = machine.send(reply)
    while isinstance(awaited, Computation):
        awaited = give_result(machine, awaited)
    return awaited


Send = Callable[[Sequence[int], Message], None]
"""Delivers a message to several addresses; never blocks."""


def pop_consecutive(entries: dict[int, Tensor], position: int, end: int) -> list[Tensor]:
    """Remove and return the entries from `position` to `end`, exclusive, up to the first gap."""
    run = []
    while position < end and position in entries:
        run.append(entries.pop(position))
        position += 1
    return run
