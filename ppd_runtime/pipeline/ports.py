"""What both state machines have in common: how they wait, send and compute."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor

from ppd_runtime.pipeline.messages import Message


class Work(IntEnum):
    """What a machine does where no message comes; of several machines in one process the least goes on first."""

    LITTLE = 0
    """It waits, or decides."""
    NEEDED = 1
    """A pass that has to be: over a certain token, or a prompt's."""
    SPECULATION = 2


def _needed() -> Work:
    return Work.NEEDED


@dataclass(slots=True)
class WaitFor:
    """A wait for a message.

    `patience` is counted in one-token layer passes: 0 takes only what is there, None waits as long as it takes.
    Yielding the same wait again goes on with what is left of its patience.
    """

    patience: int | None
    least_s: float = 0.0
    """Seconds that it is at the least, whatever a pass takes, where clocks are real."""
    deadline: float | None = None
    """Set by what runs the machine, in its own clock."""
    work: Callable[[], Work] = _needed
    """What it does where it only looks for a message, and there is none."""


class Computation:
    """What a machine asks to have computed; what runs several machines may compute for some at once."""

    __slots__ = ()

    def alone(self) -> Any:
        """Compute it."""
        raise NotImplementedError


Awaited = WaitFor | Computation
Machine = Generator[Awaited, Any, None]
"""Yields what it awaits, and is sent that: a message, or None where the patience ran out, or a computation's result."""


def next_wait(machine: Machine, reply: Message | None) -> WaitFor:
    """Send a message, or None, and compute by itself what the machine asks for, up to its next wait."""
    awaited = machine.send(reply)
    while isinstance(awaited, Computation):
        awaited = machine.send(awaited.alone())
    return awaited


Send = Callable[[Sequence[int], Message], None]
"""Delivers a message to several addresses; never blocks."""


def pop_consecutive(entries: dict[int, Tensor], position: int, end: int) -> list[Tensor]:
    """Take the entries of `position` and of those that follow it without a gap, up to `end`, out of a collection."""
    run = []
    while position < end and position in entries:
        run.append(entries.pop(position))
        position += 1
    return run


class LayerRangeLike(Protocol):
    """What the machines need of a stage; `ppd_runtime.models.stage.layer_range.LayerRange` is the real one."""

    num_layers: int
    layers_at_once: int
    """Layers that are best run in one call; more than 1 where each call has a price."""

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
