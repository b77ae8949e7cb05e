"""Keeps workers alive: replaces one that ends or no longer answers, a limited number of times in a row."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ppd_runtime.launch.bit_handshake import BitHandshake
from ppd_runtime.settings.layouts import DECIDER, Layout
from ppd_runtime.workers.bits import Bits

logger = logging.getLogger(__name__)
START_DEADLINE_S = 300.0
PING_EVERY_S = 1.0
ANSWER_DEADLINE_S = 15.0
"""A worker that is silent for this long counts as lost."""
LAST_LOOK_S = 0.5
"""A last wait: if this process, or the whole machine, was stopped, the answer comes only now."""
CLOSED = "the runtime is closed: make a new one"
_LOOK_EVERY_S = 0.02
_LONGEST_PAUSE_S = 30.0

Progress = Callable[[str], None]
"""Is told in a line what a start-up waits for."""


class WorkerHandle(Protocol):
    """One start of one worker: a process, an actor or a thread."""

    location: str
    """Where its peers reach it, once it is ready; empty if its rank says that."""
    bits: Bits
    """Its bits, once it is ready."""
    cancelled: bool
    """Whether it was cancelled before it ran at all, which says nothing against the worker."""

    def is_ready(self) -> bool:
        """Whether it has loaded its layers; raises RuntimeError with its own words if it never will."""

    def welcome(self) -> None:
        """Let it serve, once it is ready: before, it answers none of its peers."""

    def end_reason(self) -> str | None:
        """Why it ended or counts as ended, in its own words if it has any; None while it serves."""

    def wait(self, seconds: float) -> None:
        """Wait until it ends, or `seconds`."""

    def kill(self) -> None:
        """End it now, in any state."""


@dataclass
class _Post:
    """A worker's place; the worker in it may be replaced."""

    handle: WorkerHandle | None
    deadline: float = 0.0
    """Start deadline (monotonic)."""
    serving: bool = False
    spawn_at: float = 0.0
    """When to start the next one, if there is none."""
    losses: int = 0
    """Losses in a row."""
    excused: bool = False
    """Whether a cancelled start has gone uncounted since the last loss that counts."""
    starts: int = 0
    """Starts that came to serve."""
    silent: bool = False
    """Whether others have waited in vain for its message."""


class Supervisor:
    """Starts, watches and replaces a runtime's workers; works only when called, in the caller's thread.

    Args:
        layout: who the workers are, and who is needed.
        spawn: starts a worker of a rank, without waiting for it.
        most_restarts: most restarts of a worker in a row, without success between them.
        introduce: is told the rank and the location of each worker that has come to serve.
    """

    def __init__(
        self,
        layout: Layout,
        spawn: Callable[[int], WorkerHandle],
        most_restarts: int,
        introduce: Callable[[int, str], None] | None = None,
    ) -> None:
        self._spawn, self._most_restarts, self._introduce = spawn, most_restarts, introduce
        self._posts = {rank: _Post(None) for rank in range(layout.num_processes)}
        self._layout, self._handshake = layout, BitHandshake(layout)
        self._words: dict[int, str] = {}
        self._dismissed, self._failure = False, CLOSED

    def start(self, progress: Progress) -> None:
        """Start all workers and wait until all are ready.

        Raises:
            RuntimeError: with the words of the one that failed.
            TimeoutError: naming those that did not start in time.
        """
        for rank, post in self._posts.items():
            self._spawn_worker(rank, post)
        waiting: list[int] = []
        while starting := [rank for rank, post in self._posts.items() if not post.serving]:
            names = ", ".join(map(self.name_of, starting))
            if starting != waiting:
                progress(f"waiting for {names}")
                waiting = starting
            if time.monotonic() > self._posts[starting[0]].deadline:
                raise TimeoutError(f"{names} did not start within {START_DEADLINE_S:.0f} s")
            for rank in starting:
                self._welcome(rank, self._posts[rank])
            time.sleep(_LOOK_EVERY_S)

    def check(self, hear: Callable[[], None] = lambda: None) -> None:
        """Look at every worker once and replace those that are lost; a loss is logged.

        `hear` is called before a loss is reported: the lost worker's last words may have come, see `note_words`.

        Raises:
            RuntimeError: if a needed one is lost and has been replaced too often, or all have been dismissed.
        """
        if self._dismissed or not self._posts.keys() >= self._layout.needed:
            raise RuntimeError(self._failure)  # every call of several is told why
        for rank, post in list(self._posts.items()):
            reason = None
            if post.handle is not None:
                reason = self._loss(rank, post)
            elif time.monotonic() >= post.spawn_at:
                reason = self._spawn_again(rank, post)
            if reason:
                hear()
                self.replace(rank, reason)

    def replace(self, rank: int, reason: str) -> None:
        """End a worker, and start a new one at the next `check` unless it has been restarted too often.

        One cancelled start after a loss is not counted: the successor of a worker that went with its host may have been
        sent to that host before its loss was known.
        """
        post = self._posts[rank]
        post.excused = post.handle is not None and post.handle.cancelled and not post.excused
        if post.handle is not None:
            post.handle.kill()
        post.handle, post.serving = None, False
        reason = self._words.pop(rank, reason)
        post.losses += not post.excused
        if post.losses <= self._most_restarts:
            pause = 0 if post.losses <= 1 else min(2.0 ** (post.losses - 2), _LONGEST_PAUSE_S)
            post.spawn_at = time.monotonic() + pause
            logger.warning("%s is lost, a new one takes its place: %s", self.name_of(rank), reason)
            return
        again = f", after {self._most_restarts} restarts" if self._most_restarts else ""
        del self._posts[rank]
        if rank in self._layout.needed:
            self._failure = f"{self.name_of(rank)} failed{again}: {reason}"
            raise RuntimeError(self._failure)
        logger.warning("%s is lost%s, decoding goes on without it: %s", self.name_of(rank), again, reason)

    def note_words(self, rank: int, words: str) -> None:
        """Keep a worker's own words on its end; they are the reason that users see."""
        self._words[rank] = words

    def note_success(self, rank: int) -> None:
        """A worker (for the main process: all that are needed) was useful: its losses count from 0 again."""
        for useful in self._layout.needed if rank == DECIDER else (rank,):
            if post := self._posts.get(useful):
                post.losses, post.silent = 0, False

    def note_silence(self, rank: int) -> None:
        """A worker has not sent what others waited for: until it has been of use again, it is not waited for."""
        if post := self._posts.get(rank):
            post.silent = True

    def expected(self) -> list[int]:
        """The workers that serve and are worth waiting for."""
        return [rank for rank, post in self._posts.items() if post.serving and not post.silent]

    def starts(self, rank: int) -> int:
        """How often a worker has come to serve."""
        post = self._posts.get(rank)
        return post.starts if post else 0

    def is_serving(self, rank: int) -> bool:
        """Whether a worker has loaded its layers and runs, as far as is known."""
        return rank in self._posts and self._posts[rank].serving

    def serving(self) -> list[int]:
        """The workers that serve."""
        return [rank for rank, post in self._posts.items() if post.serving]

    def unwell(self) -> list[str]:
        """Names of needed workers that do not serve or have ended unnoticed. May be called in any thread."""
        return [self.name_of(rank) for rank in sorted(self._layout.needed) if not self._is_well(self._posts.get(rank))]

    @staticmethod
    def _is_well(post: _Post | None) -> bool:
        handle = post.handle if post else None
        return post is not None and post.serving and handle is not None and handle.end_reason() is None

    def name_of(self, rank: int) -> str:
        """A worker's name in messages."""
        return self._layout.named(rank)

    def dismiss(self) -> None:
        """Have the next `check` fail: from now on no worker is replaced. May be called in any thread."""
        self._dismissed, self._failure = True, CLOSED

    def stop(self, seconds: float) -> None:
        """Give serving workers, which were told to end, this long to do so; then kill all."""
        deadline = time.monotonic() + seconds
        try:
            for post in self._posts.values():
                if post.handle is not None and post.serving:
                    post.handle.wait(max(0.0, deadline - time.monotonic()))
        finally:  # an interrupt ends them at once
            for post in self._posts.values():
                if post.handle is not None:
                    post.handle.kill()
            self._posts.clear()

    def _spawn_worker(self, rank: int, post: _Post) -> None:
        self._words.pop(rank, None)  # its predecessor's
        post.handle = self._spawn(rank)
        post.deadline = time.monotonic() + START_DEADLINE_S

    def _spawn_again(self, rank: int, post: _Post) -> str | None:
        """Restart a worker; returns the reason if the system or the model's files refuse."""
        try:
            self._spawn_worker(rank, post)
        except (OSError, MemoryError, ValueError) as error:
            return f"{self.name_of(rank)} cannot be started: {type(error).__name__}: {error}"
        return None

    def _welcome(self, rank: int, post: _Post) -> None:
        try:
            if post.handle is None or not post.handle.is_ready():
                return
            self._handshake.check(rank, post.handle.bits)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name_of(rank)} failed to start: {error}") from error
        post.serving, post.starts, post.silent = True, post.starts + 1, False
        post.handle.welcome()
        if self._introduce:
            self._introduce(rank, post.handle.location)

    def _loss(self, rank: int, post: _Post) -> str | None:
        if post.serving:
            return post.handle.end_reason() if post.handle else None
        try:
            self._welcome(rank, post)
        except RuntimeError as error:
            return str(error)
        late = not post.serving and time.monotonic() > post.deadline
        return f"{self.name_of(rank)} did not start within {START_DEADLINE_S:.0f} s" if late else None
