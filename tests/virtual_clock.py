"""A cluster without computers: what the state machines of the pipeline need, on virtual clocks.

Each process has a clock that its own work advances; a message arrives a hop after it was sent. The text is the
numbers 0, 1, 2, …: the true token at a position is the position.
"""

import heapq
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.pipeline.messages import Message
from ppd_runtime.pipeline.ports import Machine, WaitFor, next_wait
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT

WRONG = -1
"""A token that is never right."""


class Clock:
    """One process' virtual time, and how long its work takes."""

    def __init__(self, layer_time: float, factor: float, jitter: float, generator: random.Random) -> None:
        self.now = 0.0
        self.layer_time = layer_time * factor
        self._factor, self._generator = factor, generator
        self._sigma = math.sqrt(math.log1p(jitter**2))  # of a log-normal factor with mean 1 and deviation `jitter`

    def spend(self, time: float) -> None:
        """Work for so long, as long as this process' factor makes it."""
        self.now += time * self._factor

    def spend_layers(self, count: int, width: float = 1.0) -> None:
        """Work for `count` layers' passes, `width` times a one-token pass and each with a random factor of its own."""
        if self._sigma:
            mean = -(self._sigma**2) / 2
            factors = (self._generator.lognormvariate(mean, self._sigma) for _ in range(count))
            self.now += self.layer_time * width * sum(factors)
        else:
            self.now += self.layer_time * width * count


class VirtualStage:
    """A `LayerRange` that computes nothing: it counts entries, layer by layer, and spends time.

    Its hidden states have no width, `[1, tokens, 0]`. A pass over candidates takes `width` times one over one token.
    """

    def __init__(self, clock: Clock, num_layers: int, head_time: float = 0.0, width: float = 1.0) -> None:
        self.num_layers = self.layers_at_once = num_layers
        self._clock, self._head_time, self._width = clock, head_time, width
        self._lengths = [0] * num_layers

    def begin(self, capacity: int) -> None:
        """Forget the last sequence."""
        self._lengths = [0] * self.num_layers

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Spend the time of a pass; a prompt's takes as long as one over one token."""
        tokens = len(inputs) if isinstance(inputs, list) else inputs.shape[1]
        self._clock.spend_layers(last - first)
        return self._append(range(first, last), tokens, position)

    def run_candidates(self, token_ids: Sequence[int], position: int) -> Tensor:
        """Spend the time of a pass over tokens that all stand at `position`."""
        self._clock.spend_layers(self.num_layers, self._width)
        return self._append(range(self.num_layers), len(token_ids), position)

    def keep_candidate(self, position: int, index: int) -> None:
        """Of the candidates at `position`, keep one."""
        self._lengths = [position + 1] * self.num_layers

    def _append(self, layers: range, tokens: int, position: int) -> Tensor:
        for layer in layers:
            if self._lengths[layer] != position:
                raise RuntimeError(f"layer {layer} holds {self._lengths[layer]} tokens, not {position}")
            self._lengths[layer] += tokens
        return torch.empty(1, tokens, 0)

    def unread_logits(self, hidden: Any) -> Any:
        """As `logits`."""
        return self.logits(hidden)

    def logits(self, hidden: Any) -> Any:
        """Spend the final head's time."""
        self._clock.spend(self._head_time)

    def length(self, layer: int) -> int:
        """Tokens whose entries `layer` holds."""
        return self._lengths[layer]

    def keep_states(self, tokens: int | None) -> None:
        """There are none."""

    def held_from(self, first: int, last: int) -> int:
        """Tokens that the first layer holds."""
        return self._lengths[0]

    def truncate(self, length: int) -> None:
        """Drop the entries of all but the first `length` tokens."""
        self._lengths = [min(held, length) for held in self._lengths]

    def export_entries(self, first: int, end: int, last: int) -> Any:
        """Entries of the tokens `first` to `end` in layers 0 to `last`: just how many layers each has."""
        return [last] * (end - first)

    def import_entries(self, entries: Sequence[Any]) -> None:
        """Append consecutive tokens' entries to the layers that they came from."""
        for layers in entries:
            for layer in range(layers):
                self._lengths[layer] += 1


class VirtualSampler(Sampler):
    """Chooses the true token."""

    def choose(self, logits: Any, history: Sequence[int]) -> int:
        """The position that follows `history`."""
        return len(history)


class VirtualExitHead:
    """Names the right token where and at which rank a pattern says so, whatever stands before it.

    Behind a candidate that is wrong the next may so be right by luck: the main process must not take it.
    """

    def __init__(self, clock: Clock, time: float, winners: Sequence[int]) -> None:
        """`winners` holds the right candidate's rank at positions 1, 2, …, or 0 where all are wrong."""
        self._clock, self._time, self._winners = clock, time, winners

    def candidates(self, hidden: Any, history: Sequence[int], k: int) -> list[int]:
        """k tokens, at most one of them right."""
        self._clock.spend(self._time)
        winner = self._winners[len(history) - 1]
        return [len(history) if rank == winner else WRONG for rank in range(1, k + 1)]


class VirtualProcess:
    """A state machine with a clock and an inbox."""

    def __init__(self, clock: Clock, machine: Machine) -> None:
        self.clock, self.stalled, self.over = clock, 0.0, False
        """`stalled` is the time spent waiting for a message."""
        self._machine = machine
        self._inbox: list[tuple[float, int, Message]] = []
        self._numbers = itertools.count()
        self._wait = WaitFor(0)

    def deliver(self, message: Message, arrival: float) -> None:
        """Put a message into the inbox, to be seen from `arrival` on."""
        heapq.heappush(self._inbox, (arrival, next(self._numbers), message))

    def resume(self, reply: Message | None) -> None:
        """Run the machine to its next wait."""
        try:
            self._wait = next_wait(self._machine, reply)
        except StopIteration:
            self.over = True
            return
        if self._wait.patience and self._wait.deadline is None:
            self._wait.deadline = self.clock.now + self._wait.patience * self.clock.layer_time

    def wakes(self) -> tuple[float, bool]:
        """When the wait ends, and whether without a message. A message that comes at that very time counts."""
        now = self.clock.now
        arrival = max(self._inbox[0][0], now) if self._inbox else math.inf
        end = max(self._end_of_patience(), now)
        return (arrival, False) if arrival <= end else (end, True)

    def go_on(self) -> None:
        """End the wait, at the time that `wakes` says."""
        time, without = self.wakes()
        if self._wait.patience != 0:
            self.stalled += time - self.clock.now
        self.clock.now = time
        self.resume(None if without else heapq.heappop(self._inbox)[2])

    def _end_of_patience(self) -> float:
        if self._wait.patience is None:
            return math.inf
        return self.clock.now if self._wait.deadline is None else self._wait.deadline


class VirtualNetwork:
    """Carries messages between processes and runs the one that is due first, until all are over."""

    def __init__(self, hop: float, slow_links: Mapping[int, float]) -> None:
        """`hop` is a message's time, multiplied for messages from or to the ranks in `slow_links`."""
        self.processes: dict[int, VirtualProcess] = {}
        self.to_client: list[Message] = []
        self._hop, self._slow_links = hop, slow_links

    def hop_between(self, sender: int, receiver: int) -> float:
        """Time of a message."""
        return self._hop * max(self._slow_links.get(sender, 1.0), self._slow_links.get(receiver, 1.0))

    def send(self, sender: int, addresses: Sequence[int], message: Message) -> None:
        """What the machines are given as their `send`, with the sender filled in."""
        for address in addresses:
            if address == CLIENT:
                self.to_client.append(message)
            else:
                arrival = self.processes[sender].clock.now + self.hop_between(sender, address)
                self.processes[address].deliver(message, arrival)

    def run(self) -> None:
        """Start every process, then always end the earliest wait: nothing that happens later can affect it."""
        for process in self.processes.values():
            process.resume(None)
        while waiting := [process for process in self.processes.values() if not process.over]:
            min(waiting, key=VirtualProcess.wakes).go_on()
