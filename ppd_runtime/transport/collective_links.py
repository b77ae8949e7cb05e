"""One process' link to one incarnation of a peer: tensors over a channel of their own, announced by control messages.

Transfers are numbered in each direction. If receives are posted ahead, one for `slot` bytes always waits: the size of
the smallest tensor so far, a hidden state. A filler before a larger tensor uses up that receive.
"""

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime.pipeline.messages import LinkNote, Message, TensorAnnouncement
from ppd_runtime.pipeline.wire import received
from ppd_runtime.transport.collective_groups import Channel, CollectiveBackend, PairStore, Transfer

logger = logging.getLogger(__name__)
_UP, _BROKEN, _TAKEN, _WORD = "up", "broken", "taken", "word "
_MOST_SLOT_BYTES = 2**20
_TELL_EVERY = 4  # transfers, after which a sender hears how many have been taken
_WATCH_EVERY_S = 1.0
_PATIENCE_S = 3.0  # for a tensor whose message has come; a dead peer is noticed sooner …
_SLOWEST = 10e6  # … and a second more for each this many bytes
_GPU_PATIENCE_S = 20.0  # it may have yet to be computed; others are not kept waiting meanwhile
_CLOSE_S = 2.0
_REST_S, _LONGEST_REST_S = 2.0, 60.0
_MOST_IN_VAIN = 5  # attempts; then the peer is not there, or cannot be reached in this way


@dataclass
class _Arriving:
    """A message whose tensor is on its way; `fillers` come before it."""

    announcement: TensorAnnouncement
    transfers: list[Transfer]
    deadline: float


class Link:
    """Carries tensors to and from a peer once both ends are up; before that, or if it breaks, it declines.

    Args:
        incarnations: of these two, in the same order at both ends.
        attempt: how many links of these incarnations have broken before.
        own, peer: addresses.
        backend: what this process' groups have in common.
        tell: sends the peer a control message; called in any thread.
    """

    def __init__(
        self,
        incarnations: str,
        attempt: int,
        own: int,
        peer: int,
        backend: CollectiveBackend,
        tell: Callable[[int, Message], None],
    ) -> None:
        self.incarnations, self.attempt, self.name = incarnations, attempt, f"{incarnations}-{attempt}"
        self._own, self.peer, self._backend, self._tell = own, peer, backend, tell
        self._reopen_at = math.inf
        self.next_attempt = attempt + 1
        self._store = PairStore(lambda key, value: self._note(_WORD + key, value))
        self._channel: Channel | None = None
        self._peer_is_up = self._broken = False
        self._settled, self._ended = threading.Event(), threading.Event()
        self._held: deque[_Arriving | Message] = deque()
        self._sent: deque[tuple[int, object, Tensor]] = deque()
        self._num_sent = self._num_received = self._num_taken = 0
        self._slot_out = self._slot_in = _MOST_SLOT_BYTES + 1
        self._ahead: Transfer | None = None
        self._thread = threading.Thread(target=self._open, name=f"ppd-link-{peer}", daemon=True)
        self._thread.start()

    @property
    def is_opening(self) -> bool:
        """Whether it may soon have something to tell its peer."""
        return not self._settled.is_set()

    @property
    def wants_successor(self) -> bool:
        """Whether it has broken, no message waits in it, and it has rested, longer each time."""
        return self.rest_left <= 0 and not self._held

    @property
    def rest_left(self) -> float:
        """Seconds until a successor may be opened; infinite for one that is in order or closed for good."""
        return self._reopen_at - time.monotonic()

    @property
    def holds(self) -> bool:
        """Whether messages wait for a tensor."""
        return bool(self._held)

    @property
    def takes(self) -> bool:
        """Whether it can carry one more tensor."""
        return self._peer_is_up and not self._broken and len(self._sent) < self._backend.most_under_way

    def post(self, message: Message, header: bytes, raw: Tensor) -> TensorAnnouncement | None:
        """Begin to send a message's tensor, `raw`, unchanged from now on; returns what to send instead.

        That is None if the link is broken, or has much under way.
        """
        channel, under_way = self._channel, sum(len(sent) for _, _, sent in self._sent)
        if channel is None or under_way + len(raw) > self._backend.most_bytes_under_way:
            return None
        try:
            if self._backend.posts_ahead and self._slot_out <= _MOST_SLOT_BYTES and len(raw) != self._slot_out:
                self._send(channel, torch.zeros(self._slot_out, dtype=torch.uint8))
            self._send(channel, raw)
        except RuntimeError as error:
            self._break(f"cannot be sent to: {_own_words(error)}")
            return None
        self._slot_out = min(self._slot_out, len(raw))
        return TensorAnnouncement(self._own, message.request, self.name, self._num_sent - 1, len(raw), header)

    def take_note(self, note: LinkNote) -> None:
        """Hear what the peer has to say about the link."""
        if note.key == _UP:
            self._peer_is_up = True
        elif note.key == _BROKEN:
            self._break("has broken at the other end", tell=False)
        elif note.key == _TAKEN and len(note.value) <= 20 and note.value.isdigit():
            while self._sent and self._sent[0][0] < int(note.value):
                self._sent.popleft()
        elif note.key.startswith(_WORD):
            self._store.hear(note.key.removeprefix(_WORD), note.value)

    def hold(self, message: Message) -> None:
        """Keep a message of the peer until its tensor, and what came before it, is there."""
        if not isinstance(message, TensorAnnouncement):
            self._held.append(message)
        elif not self._broken and (arriving := self._receive(message)):
            self._held.append(arriving)

    def next(self) -> Message | None:
        """The next message of those held, if all of it is there."""
        while self._held:
            first = self._held[0]
            if not isinstance(first, _Arriving):
                self._held.popleft()
                return first
            is_here = not self._broken and self._has(first)
            if not (is_here or self._broken):
                return None
            self._held.popleft()
            if not is_here:
                logger.warning("dropped a message of worker %d: its tensor did not come", self.peer)
            elif message := self._complete(first):
                return message
        return None

    def give_way(self, attempt: int) -> None:
        """Let a successor open without a rest: the peer has opened it."""
        self._break("has broken at the other end", tell=False)
        self._reopen_at, self.next_attempt = 0.0, attempt

    def close(self) -> None:
        """Break the connection, in a thread of its own; see `wait_closed`."""
        self._broken = True
        self._ended.set()
        self._store.close()
        self._thread = threading.Thread(target=self._shut, args=(self._thread,), name="ppd-link-closing", daemon=True)
        self._thread.start()

    def wait_closed(self) -> None:
        """Wait until it is closed, but not for long: a library may be stuck with a peer that is gone."""
        self._thread.join(_CLOSE_S)

    def _open(self) -> None:
        """Meet the peer and connect; runs in a thread."""
        try:
            self._channel = self._backend.connect(self._store, 0 if self._own < self.peer else 1)
            self._note(_UP, b"")
        except (RuntimeError, OSError) as error:
            self._break(f"does not open: {_own_words(error)}")
        finally:
            self._settled.set()
        if self._channel and not self._backend.posts_ahead:
            self._watch()

    def _watch(self) -> None:
        """Break the link if a tensor is overdue, even if the main thread waits for the GPU, and the GPU for the tensor.

        An aborted kernel looks as if it had brought its tensor, so `_has` looks at `_broken` last.
        """
        while not self._ended.wait(_WATCH_EVERY_S):
            first = next(iter(tuple(self._held)), None)
            if isinstance(first, _Arriving) and time.monotonic() > first.deadline + _WATCH_EVERY_S:
                self._break("has not brought a tensor in time")

    def _shut(self, opening: threading.Thread) -> None:
        opening.join()
        self._sent.clear()
        if self._channel:
            self._channel.close()
        self._channel = self._ahead = None

    def _send(self, channel: Channel, raw: Tensor) -> None:
        self._sent.append((self._num_sent, channel.send(raw), raw))
        self._num_sent += 1

    def _receive(self, announcement: TensorAnnouncement) -> _Arriving | None:
        """Receive a message's tensor, and then, ahead of need, the next one; None if transfers do not add up."""
        channel = self._channel
        fillers = int(self._ahead is not None and announcement.num_bytes != self._slot_in)
        if channel is None or announcement.number != self._num_received + fillers:
            self._break("has lost a message")
            return None
        try:
            transfers = [self._ahead] if self._ahead else []
            if fillers or not transfers:
                transfers.append(channel.receive(announcement.num_bytes))
            self._num_received += 1 + fillers
            self._slot_in = min(self._slot_in, announcement.num_bytes)
            ahead = self._backend.posts_ahead and self._slot_in <= _MOST_SLOT_BYTES
            self._ahead = channel.receive(self._slot_in) if ahead else None
        except RuntimeError as error:
            self._break(f"cannot be received from: {_own_words(error)}")
            return None
        patience = _PATIENCE_S + announcement.num_bytes / _SLOWEST if self._backend.posts_ahead else _GPU_PATIENCE_S
        return _Arriving(announcement, transfers, time.monotonic() + patience)

    def _has(self, arriving: _Arriving) -> bool:
        """Whether the tensor is there; breaks the link if it will not come."""
        left = arriving.deadline - time.monotonic()
        try:
            if all(transfer.is_here(left) for transfer in arriving.transfers):
                return not self._broken
        except RuntimeError as error:
            self._break(f"has not brought a tensor: {_own_words(error)}")
        if left <= 0:
            self._break("has not brought a tensor in time")
        return False

    def _complete(self, arriving: _Arriving) -> Message | None:
        self._num_taken = arriving.announcement.number + 1
        if self._num_taken % _TELL_EVERY < len(arriving.transfers):
            self._note(_TAKEN, str(self._num_taken).encode())
        return received([arriving.announcement.header, arriving.transfers[-1].raw])

    def _break(self, reason: str, tell: bool = True) -> None:
        """Give the link up; tensors go with their messages from now on."""
        if self._broken:
            return
        logger.warning("the link to worker %d %s: its tensors go by ZeroMQ", self.peer, reason)
        if self._peer_is_up or self.attempt < _MOST_IN_VAIN:
            self._reopen_at = time.monotonic() + min(_REST_S * 2 ** min(self.attempt, 9), _LONGEST_REST_S)
        if tell:
            self._note(_BROKEN, b"")
        self.close()

    def _note(self, key: str, value: bytes) -> None:
        self._tell(self.peer, LinkNote(self._own, 0, self.name, key, value))


def read_name(name: str) -> tuple[str, int]:
    """The incarnations and the attempt that a link's name tells; -1 if it tells none."""
    incarnations, _, attempt = name.rpartition("-")
    return incarnations, int(attempt) if attempt.isdecimal() and len(attempt) < 10 else -1


def _own_words(error: Exception) -> str:
    """A library's message, without the place in its code and possible causes."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0] or type(error).__name__
