"""Links driven as NCCL drives them, over Gloo: no receive before its announcement, and no process waits for a tensor.

On a GPU a receive is asked for when its message has come, its arrival is an event that is looked at, and what is
overdue is found out by a thread of the link's. Here a thread waits in the event's place; the rest is what GPUs run.
"""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from collective_places import DEADLINE, Places, same, tensors

from ppd_runtime.pipeline.messages import Candidate, End, Entries, ExitState, Message, TensorAnnouncement
from ppd_runtime.pipeline.wire import split
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport import collective_groups as groups
from ppd_runtime.transport import collective_links as links
from ppd_runtime.transport.collective_endpoint import CollectiveEndpoint
from ppd_runtime.transport.collective_groups import CollectiveBackend

UNDER_WAY, BYTES_UNDER_WAY = 8, 2**20
"""As many transfers as `CollectiveBackend` has under way on a GPU."""


class Watched(groups.Transfer):
    """A transfer whose arrival is looked at and never waited for."""

    def __init__(self, work: object, raw: torch.Tensor) -> None:
        super().__init__(work, raw)
        self._ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self._work.wait()
            self._ended.set()
        except RuntimeError:
            return  # as a kernel that spins for a peer that is gone

    def is_here(self, seconds: float) -> bool:
        """Asked at once, whatever time there is."""
        return self._ended.is_set()


class AsOnGpus(CollectiveBackend):
    """What a GPU's backend says of itself."""

    def __init__(self, device: str, interface: str) -> None:
        super().__init__(device, interface)
        self.posts_ahead = False
        self.most_under_way, self.most_bytes_under_way = UNDER_WAY, BYTES_UNDER_WAY


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setattr(groups, "Transfer", Watched)
    monkeypatch.setattr("ppd_runtime.transport.collective_endpoint.CollectiveBackend", AsOnGpus)
    monkeypatch.setattr(links, "_WATCH_EVERY_S", 0.1)
    monkeypatch.setattr(links, "_REST_S", 0.3)
    places = Places(tmp_path)
    yield places
    for endpoint in places.endpoints.values():
        endpoint.close()


def announce(sender: CollectiveEndpoint, message: Message) -> None:
    """The word of a tensor that is never sent."""
    header, raw = split(message)
    assert raw is not None
    link = sender._links[DECIDER]
    announcement = TensorAnnouncement(1, 1, link.name, link._num_sent, raw.numel(), header)
    sender._control.send(DECIDER, announcement)


def wait_for_announcement(receiver: CollectiveEndpoint) -> None:
    """Until it knows of a tensor that is under way."""
    deadline = time.monotonic() + DEADLINE
    while not receiver._links[1].holds:
        assert receiver.receive(0.01) is None
        assert time.monotonic() < deadline


def test_bits_and_order_stay_as_they_are(places: Places) -> None:
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    for number in range(8):
        sent: list[Message] = []
        for at, tensor in enumerate(tensors(number)):
            sent += [ExitState(DECIDER, 1, at, tensor), Candidate(DECIDER, 1, at, (3,))]
        for message in sent:
            main.send(1, message)
        assert all(same(sub.receive(DEADLINE), message) for message in sent)
        assert sub._links[DECIDER]._ahead is None, "no receive before its announcement"
        assert main.receive(0.1) is None, "hears what has been taken"
    assert sub._links[DECIDER]._num_received > 3 * 7


def test_no_more_is_under_way_than_nccls_buffers_hold(places: Places) -> None:
    """For more a sending kernel would spin; the rest goes with its messages."""
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    link = main._links[1]
    sent = [Entries(DECIDER, 1, at, torch.full((50_000,), float(at))) for at in range(30)]
    for message in sent:
        main.send(1, message)
        assert len(link._sent) <= UNDER_WAY
        assert sum(len(raw) for _, _, raw in link._sent) <= BYTES_UNDER_WAY
    received = [sub.receive(DEADLINE) for _ in sent]
    assert sorted(m.position for m in received) == list(range(30))
    assert all(same(m, sent[m.position]) for m in received)


def test_while_a_tensor_is_overdue_others_are_heard_and_then_its_link_breaks(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not waited for: the client's word comes at once, what its sender said behind it when it is given up."""
    main, sub, client = (places.open(address) for address in (DECIDER, 1, CLIENT))
    places.wait_for_links()
    message = ExitState(1, 1, 5, torch.ones(1, 1, 64))
    announce(sub, message)
    sub.send(DECIDER, End(1, 7))
    wait_for_announcement(main)
    client.send(DECIDER, End(CLIENT, 3))
    assert main.receive(DEADLINE) == End(CLIENT, 3)
    main._links[1]._held[0].deadline = 0.0
    with caplog.at_level(logging.WARNING):
        assert main.receive(DEADLINE) == End(1, 7)
    assert "the link to worker 1 has not brought a tensor in time" in caplog.text
    assert main.receive(0) is None
    assert sub.receive(0.1) is None, "hears that the link is broken"
    sub.send(DECIDER, message)
    assert same(main.receive(DEADLINE), message), "with its message, or over a new link"
    places.wait_for_links()


def test_a_links_own_thread_breaks_it_while_the_worker_computes(places: Places) -> None:
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    link = main._links[1]
    announce(sub, ExitState(1, 1, 5, torch.ones(1, 1, 64)))
    wait_for_announcement(main)
    link._held[0].deadline = 0.0
    deadline = time.monotonic() + DEADLINE
    while not link._broken:
        assert time.monotonic() < deadline, "nobody looked"
        time.sleep(0.01)
    assert link.next() is None, "what came over a broken link is no tensor"
