"""An endpoint whose tensors go to other workers from device to device; all else goes over ZeroMQ."""

import logging
import math
import secrets
import time
from queue import Empty, SimpleQueue

from torch import Tensor

from ppd_runtime.pipeline.messages import LinkNote, Message, TensorAnnouncement
from ppd_runtime.pipeline.wire import split, tensor_bytes
from ppd_runtime.settings.layouts import CLIENT
from ppd_runtime.transport.collective_groups import CollectiveBackend, check_backend
from ppd_runtime.transport.collective_links import Link, read_name
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.zeromq import ZmqEndpoint

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.005  # while a link opens, for what its thread wants to tell
_MOST_EARLY = 64  # notes about links of incarnations that have not been introduced yet


class CollectiveEndpoint:
    """One process' place: ZeroMQ sockets, and a link to each worker that it has been introduced to.

    Links open in threads of their own; until then, and while one has broken, tensors go with their messages. Messages
    to and from the client always do. Not to be shared between threads.
    """

    def __init__(self, network: Network, address: int, device: str) -> None:
        if address != CLIENT:
            check_backend(device)
        self._control = ZmqEndpoint(network, address)
        try:
            self._backend = None if address == CLIENT else CollectiveBackend(device, network.interface)
        except BaseException:
            self._control.close()
            raise
        self._address, self._incarnation = address, secrets.token_hex(8)
        self.location = f"{self._control.location}#{self._incarnation}"
        """The sockets' location, and this worker's incarnation."""
        self._peers: dict[int, str] = {}
        self._links: dict[int, Link] = {}
        self._early: list[LinkNote] = []
        self._outbox: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        self._last: tuple[Message, bytes, Tensor] | None = None

    @property
    def is_opening(self) -> bool:
        """Whether some link is neither up nor given up yet."""
        return any(link.is_opening for link in self._links.values())

    def introduce(self, address: int, location: str) -> None:
        """From now on a peer is there; the link to its last incarnation is closed, and one to this incarnation opens.

        For a known incarnation this changes nothing: a process may find in its inbox what was for its predecessor, and
        hear the same again.
        """
        if self._peers.get(address) == location:
            return
        self._peers[address] = location
        place, _, incarnation = location.partition("#")
        self._control.introduce(address, place)
        if old := self._links.pop(address, None):
            old.close()
        if incarnation and self._backend and address != CLIENT:
            pair = (self._incarnation, incarnation) if self._address < address else (incarnation, self._incarnation)
            self._open(address, "-".join(pair), 0)

    def send(self, address: int, message: Message) -> None:
        """Deliver a message; its tensor, if any, goes over the link."""
        self._tell_peers()
        link = self._links.get(address)
        self._control.send(address, (self._post(link, message) if link else None) or message)

    def receive(self, timeout: float | None) -> Message | None:
        """The next message, with its tensor, or None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._tell_peers()
            for link in tuple(self._links.values()):
                if message := link.next():
                    return message
                if link.wants_successor:
                    self._open(link.peer, link.incarnations, link.next_attempt)
            message = self._control.receive(self._patience(deadline))
            if message is None:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
            elif isinstance(message, LinkNote):
                self._take_note(message)
            elif not self._hold(message):
                return message

    def close(self) -> None:
        """Close links and sockets; what was sent has half a second to leave."""
        links, self._links = self._links.values(), {}
        for link in links:
            link.close()
        for link in links:
            link.wait_closed()
        if self._backend:
            self._backend.close()
        self._control.close()

    def _open(self, address: int, incarnations: str, attempt: int) -> None:
        assert self._backend is not None
        self._links[address] = Link(incarnations, attempt, self._address, address, self._backend, self._tell)
        early, self._early = self._early, []
        for note in early:
            self._take_note(note)

    def _post(self, link: Link, message: Message) -> TensorAnnouncement | None:
        """A message in two parts, if it has a tensor; the same message to the next address is not split again."""
        if not link.takes or not tensor_bytes(message):
            return None
        if self._last is None or self._last[0] is not message:
            header, raw = split(message)
            assert raw is not None
            self._last = message, header, raw.clone()  # the machine may change its own
        return link.post(*self._last)

    def _hold(self, message: Message) -> bool:
        """Whether a message, or what came before it from its sender, waits for a tensor."""
        link = self._links.get(message.sender)
        if isinstance(message, TensorAnnouncement):
            if link and link.name == message.link:
                link.hold(message)
            return True  # what another incarnation sent is of no use
        if link and link.holds:
            link.hold(message)
            return True
        return False

    def _take_note(self, note: LinkNote) -> None:
        link = self._links.get(note.sender)
        incarnations, attempt = read_name(note.link)
        if link is None or link.incarnations != incarnations:
            if self._incarnation in incarnations:
                self._early = [*self._early, note][-_MOST_EARLY:]
        elif attempt == link.attempt:
            link.take_note(note)
        elif attempt > link.attempt:
            link.give_way(attempt)
            self._early = [*self._early, note][-_MOST_EARLY:]

    def _patience(self, deadline: float | None) -> float | None:
        """How long to wait for a control message before links are looked at again."""
        if any(link.holds for link in self._links.values()):
            return 0.0
        soonest = min((link.rest_left for link in self._links.values()), default=math.inf)
        if not self._outbox.empty() or self.is_opening:
            soonest = _LOOK_EVERY_S
        left = math.inf if deadline is None else deadline - time.monotonic()
        return None if (patience := min(left, soonest)) == math.inf else max(patience, 0.0)

    def _tell(self, address: int, note: Message) -> None:
        self._outbox.put((address, note))

    def _tell_peers(self) -> None:
        try:
            while True:
                self._control.send(*self._outbox.get_nowait())
        except Empty:
            return
