"""Workers as threads whose messages and ends are drawn from a seed: lost, doubled, late, cut, dead."""

import contextlib
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hostile_drafters import HostileNetwork, any_misdeed
from torch import Tensor

from ppd_runtime.launch.threads import LocalWorkers, ThreadHandle
from ppd_runtime.pipeline.messages import Message, Shutdown
from ppd_runtime.pipeline.wire import WireError, decode, encode
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.workers.bits import NO_BITS
from ppd_runtime.workers.worker import Worker

LONGEST_STOP_S = 0.4


class ChanceNetwork(HostileNetwork):
    """A drafter's network that goes wrong at times, and at times takes its worker along."""

    def __init__(self, fate: "Fate", text: Sequence[int], tokens: Sequence[int]) -> None:
        self._fate = fate
        super().__init__(text, tokens, self._perhaps(any_misdeed(random.Random(fate.seed))))

    def _perhaps(self, misdeed: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        def perhaps(logits: Tensor) -> object:
            if self._fate.strikes("drafting_death"):
                raise Killed
            return misdeed(logits) if self._fate.strikes("misdeed") else logits

        return perhaps


class Killed(BaseException):
    """What ends a worker without a word, as SIGKILL would."""


@dataclass
class Fate:
    """How likely each mishap is, for each message or each look for one; drawn from one seed for all."""

    seed: int
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    """Held back until some later message of the same sender has left."""
    stale: float = 0.0
    """A message from the past, of this request or an earlier one, of this worker or a predecessor, comes again."""
    cut: float = 0.0
    """Its bytes end early."""
    death: float = 0.0
    """Of a sub-process, at any time that it sends or looks for a message."""
    main_death: float = 0.0
    all_death: float = 0.0
    """Of all sub-processes, each at its next such time."""
    raised: float = 0.0
    """By anybody, at any such time: a MemoryError whose words are its own, see `words`."""
    stopped: float = 0.0
    """Anybody, at any such time, for up to `LONGEST_STOP_S`, as by SIGSTOP and then SIGCONT."""
    misdeed: float = 0.0
    """Of a drafter: something else in place of a draft's logits."""
    drafting_death: float = 0.0
    """Of the worker that drafts, at a draft."""
    happened: Counter = field(default_factory=Counter)
    deaths_of_all: int = 0
    words: list[str] = field(default_factory=list)
    """What the exceptions said that were raised."""

    def __post_init__(self) -> None:
        self._random, self._lock = random.Random(self.seed), threading.Lock()

    def strikes(self, name: str) -> bool:
        """Whether a mishap happens now."""
        with self._lock:
            hit = self._random.random() < getattr(self, name)
            self.happened[name] += hit
            return hit

    def strikes_all(self) -> int:
        """How often all sub-processes have been told to die, this time included."""
        struck = self.strikes("all_death")
        with self._lock:
            self.deaths_of_all += struck
            return self.deaths_of_all

    def error(self) -> MemoryError:
        """One that was not raised before."""
        with self._lock:
            self.words.append(f"no room for thing {len(self.words)}.")
            return MemoryError(self.words[-1])

    def pick(self, number: int) -> int:
        """One of so many."""
        with self._lock:
            return self._random.randrange(number)


@dataclass
class Post:
    """What an address has sent before and after restarts, and what is still on its way."""

    past: list[tuple[int, Message]] = field(default_factory=list)
    held: list[tuple[int, Message]] = field(default_factory=list)


class ChaosEndpoint:
    """Another endpoint, whose messages meet with mishaps."""

    def __init__(self, endpoint, fate: Fate, address: int, post: Post) -> None:
        self._endpoint, self._fate, self._address = endpoint, fate, address
        self._held, self._past = post.held, post.past
        self._speaks_its_last, self._survived = False, fate.deaths_of_all

    def introduce(self, address: int, location: str) -> None:
        """As the endpoint does."""
        self._endpoint.introduce(address, location)

    def send(self, address: int, message: Message) -> None:
        """Deliver, or not."""
        self._perhaps_die()
        if isinstance(message, Shutdown) or self._speaks_its_last:
            self._endpoint.send(address, message)
            return
        self._past.append((address, message))
        if self._fate.strikes("late"):
            self._held.append((address, message))
        elif not self._fate.strikes("lost"):
            self._deliver(address, message)
            if self._fate.strikes("doubled"):
                self._deliver(address, message)
            while self._held and self._fate.pick(3):
                self._deliver(*self._held.pop(self._fate.pick(len(self._held))))
        if self._fate.strikes("stale"):
            self._deliver(*self._past[self._fate.pick(len(self._past))])
        self._perhaps_die()

    def receive(self, timeout: float | None) -> Message | None:
        """As the endpoint does."""
        self._perhaps_die()
        message = self._endpoint.receive(timeout)
        self._perhaps_die()
        return message

    def close(self) -> None:
        """As the endpoint does."""
        self._endpoint.close()

    def _deliver(self, address: int, message: Message) -> None:
        frames = [bytes(frame) for frame in encode(message)]
        if self._fate.strikes("cut"):
            victim = self._fate.pick(len(frames))
            frames[victim] = frames[victim][: self._fate.pick(len(frames[victim]))]
        with contextlib.suppress(WireError):  # what arrives broken is dropped
            self._endpoint.send(address, decode(frames))

    def _perhaps_die(self) -> None:
        if self._address == CLIENT or self._speaks_its_last:
            return
        if self._fate.strikes("stopped"):
            time.sleep(LONGEST_STOP_S * self._fate.pick(1000) / 1000)
        if self._fate.strikes("main_death" if self._address == DECIDER else "death"):
            raise Killed
        if self._address != DECIDER and self._fate.strikes_all() > self._survived:
            raise Killed
        if self._fate.strikes("raised"):
            self._speaks_its_last = True
            raise self._fate.error()


class ChaosWorkers(LocalWorkers):
    """Workers of one fate."""

    fate: Fate

    def __init__(self, *arguments) -> None:
        self._posts: dict[int, Post] = defaultdict(Post)
        super().__init__(*arguments)
        self.endpoint = ChaosEndpoint(self.endpoint, self.fate, CLIENT, Post())

    def _spawn(self, rank: int) -> ThreadHandle:
        self._spawned.append(rank)
        endpoint = ChaosEndpoint(self._network.endpoint(rank), self.fate, rank, self._posts[rank])
        return MortalHandle(Worker(self._specs[rank]), endpoint, NO_BITS)


class MortalHandle(ThreadHandle):
    """A worker that may end without a word."""

    @staticmethod
    def _serve(worker, endpoint) -> None:
        with contextlib.suppress(Killed, Exception):
            worker.serve(endpoint)


def chaos(fate: Fate) -> type[ChaosWorkers]:
    """A class of workers of this fate, to stand in for `LocalWorkers`."""
    return type("Workers", (ChaosWorkers,), {"fate": fate})
