"""The interface of all state machines: how they wait, send and compute."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from ppd_runtime.pipeline.messages import Message
from ppd_runtime.request_error import RequestError


class Work(IntEnum):
    """The work that a machine does without a message; among a process' machines the least value goes first."""

    LITTLE = 0
    """No pass: the machine waits, or decides."""
    NEEDED = 1
    """A pass that is needed: over a certain token, or a prompt."""
    SPECULATION = 2


def _needed() -> Work:
    return Work.NEEDED


@dataclass(slots=True)
class WaitFor:
    """A wait for a message.

    `patience` is measured in one-token layer passes: 0 takes only a message that is there, None waits without limit.
    Yielding the same wait again continues with its remaining patience.
    """

    patience: int | None
    least_s: float = 0.0
    """Seconds to wait at least, however short a pass is; for real clocks only."""
    deadline: float | None = None
    """The end of the wait, which the machine's runner sets on its own clock."""
    work: Callable[[], Work] = _needed
    """The work that the machine does if `patience` is 0 and no message is there."""


class Computation:
    """A computation that a machine asks for; a runner of several machines may batch computations."""

    __slots__ = ()

    def alone(self) -> Any:
        """Compute this alone, and return the result."""
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
"""Yields waits and computations; is sent a message, None if the patience ran out, or the computation's value."""


def give_result(machine: Machine, computation: Computation) -> Awaited:
    """Compute for a machine and resume it, with a `RequestError` if there was one; returns what it awaits next."""
    try:
        result = computation.alone()
    except RequestError as error:
        return machine.throw(error)
    return machine.send(result)


def next_wait(machine: Machine, reply: Message | None) -> WaitFor:
    """Send a machine a message or None, compute what it asks for one by one, and return its next wait."""
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
