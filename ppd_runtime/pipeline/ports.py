"""What both state machines have in common: how they wait, send and compute."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from ppd_runtime.pipeline.messages import Message


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


Awaited = WaitFor | Computation
Machine = Generator[Awaited, Any, None]
"""Yields what it awaits and is sent the result: a message, None when patience ran out, or a computation's value."""


def next_wait(machine: Machine, reply: Message | None) -> WaitFor:
    """Send a message or None; compute, one by one, what the machine asks for up to its next wait."""
    awaited = machine.send(reply)
    while isinstance(awaited, Computation):
        awaited = machine.send(awaited.alone())
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


class LayerRangeLike(Protocol):
    """What the machines need of a stage; `ppd_runtime.models.stage.layer_range.LayerRange` is the real one."""

    num_layers: int
    layers_at_once: int
    """Layers that are best run in one call; more than 1 if each call has overhead."""

    def begin(self, capacity: int) -> None:
        """Forget the last sequence and make room for `capacity` tokens."""

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a half-open range of layers over token ids or hidden states that start at `position`."""

    def run_candidates(self, token_ids: Sequence[int], position: int) -> Tensor:
        """Run all layers over tokens that all stand at `position`, each seeing what came before and itself."""

    def keep_candidate(self, position: int, index: int) -> None:
        """Keep the entries of one candidate at `position`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head over the newest hidden state."""

    def length(self, layer: int) -> int:
        """Tokens whose entries `layer` holds."""

    def truncate(self, length: int) -> None:
        """Drop the entries of all but the first `length` tokens."""

    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """Copy the entries of the tokens `first` to `end` out of layers 0 to `last`, one token a row."""

    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append consecutive tokens' entries to the first layers."""
