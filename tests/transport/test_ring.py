"""A ring beside a stream: tensors come out as they went in, and whatever is wrong costs the ring, never a message."""

import logging
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rings import ends_of, num_open, numbers, send
from torch import Tensor

from ppd_runtime.pipeline.messages import Candidate, End, Entries, ExitState, Message, PromptStates
from ppd_runtime.pipeline.wire import WireError, split
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.transport.ring import CAPACITY, RingReader, RingWriter
from ppd_runtime.transport.streams import Inlet
from ppd_runtime.transport.unix import UnixEndpoint

DEADLINE = 20.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[UnixEndpoint, UnixEndpoint]]:
    """A worker and the main process, all of whose tensors go through rings; the stream from worker to main is open."""
    sub, main = (UnixEndpoint(str(tmp_path), address, ring_from=1) for address in (1, DECIDER))
    sub.send(DECIDER, End(1, 0))
    assert main.receive(DEADLINE) == End(1, 0)
    yield sub, main
    sub.close()
    main.close()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The position and size of each tensor that comes out of a ring."""
    taken: list[tuple[int, int]] = []
    take = RingReader.take
    monkeypatch.setattr(RingReader, "take", lambda *place: (taken.append(place[1:]), take(*place))[1])
    return taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (1, 1, 576), (3, 1, 5, 7), (1, 300, 777), (4, 32, 2, 8, 64)])
def test_tensors_arrive_bit_for_bit(pair, places, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sub, main = pair
    sent = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for tensor in (sent, sent.transpose(0, -1)):
        sub.send(DECIDER, Entries(1, 1, 5, tensor))  # its own stream begins with a message as a whole
        sub.send(DECIDER, PromptStates(1, 1, 0, 0, tensor))
        arrived = {type(message): message for message in (main.receive(DEADLINE), main.receive(DEADLINE))}
        for found in (arrived[Entries].entries, arrived[PromptStates].hidden):
            assert found.dtype == dtype
            assert torch.equal(found, tensor)
    assert [size for _, size in places] == [sent.nbytes] * 3


def test_a_tensor_that_came_is_the_readers_own(pair) -> None:
    sub, main = pair
    states = [PromptStates(1, 1, 0, i, torch.full((1, 4, 8), float(i))) for i in range(9)]
    arrived = []
    for state in states:
        sub.send(DECIDER, state)
        arrived.append(main.receive(DEADLINE))
    assert [message.hidden.unique().tolist() for message in arrived] == [[i] for i in range(9)]


def test_one_message_for_many_goes_through_each_ones_ring(tmp_path: Path, places) -> None:
    main = UnixEndpoint(str(tmp_path), DECIDER, ring_from=1)
    subs = [UnixEndpoint(str(tmp_path), rank, ring_from=1) for rank in (1, 2)]
    for position in range(4):
        state = ExitState(DECIDER, 1, position, torch.full((1, 1, 8), float(position)))
        for rank, sub in enumerate(subs, 1):
            main.send(rank, state)
            arrived = sub.receive(DEADLINE)
            assert (arrived.position, arrived.hidden.tolist()) == (position, state.hidden.tolist())
    assert len(places) == 6, "all but each stream's first"
    for endpoint in (main, *subs):
        endpoint.close()


def test_small_tensors_and_those_for_the_client_go_as_ever(tmp_path: Path, places) -> None:
    sub, main = UnixEndpoint(str(tmp_path), 1, ring_from=4096), UnixEndpoint(str(tmp_path), DECIDER)
    for size in (1, 1, 1023, 1024, 5000):
        sub.send(DECIDER, ExitState(1, 1, size, torch.ones(1, 1, size)))
        assert main.receive(DEADLINE).hidden.shape[2] == size
    assert [size for _, size in places] == [4096, 20_000]
    sub.close()
    main.close()


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_sizes_in_a_small_ring(seed: int) -> None:
    """The reader lags, the ring wraps around and is full; what was put is never written over before it is taken."""
    generator, capacity = random.Random(seed), 4096
    writer, reader = ends_of(capacity)
    waiting: deque[tuple[int, Tensor]] = deque()
    num_full = num_taken = 0
    for number in range(600):
        if waiting and generator.random() < 0.5:
            position, raw = waiting.popleft()
            assert torch.equal(reader.take(position, len(raw)), raw)
            num_taken += 1
            continue
        raw = numbers(generator.choice([1, 63, 64, 65, 1000, 2048, generator.randrange(1, capacity + 1)]), number)
        position = writer.put(raw)
        if position is not None and generator.random() < 0.9:  # the others' messages could not leave
            writer.keep()
            waiting.append((position, raw))
        num_full += position is None
        assert position is not None or waiting, "an empty ring takes what it is large enough for"
    assert num_full > 20
    assert num_taken > 100
    assert writer._end > 10 * capacity
    writer.close()
    reader.close()


def test_a_ring_takes_as_much_as_it_holds_and_again_what_was_taken() -> None:
    writer, reader = ends_of(4096)
    assert writer.put(numbers(4097)) is None
    places = [send(writer, numbers(1024, i)) for i in range(5)]
    assert places == [0, 1024, 2048, 3072, None]
    assert torch.equal(reader.take(0, 1024), numbers(1024, 0))
    assert send(writer, numbers(1024, 9)) == 4096
    assert writer.put(numbers(1)) is None
    for place, seed in ((1024, 1), (2048, 2), (3072, 3), (4096, 9)):
        assert torch.equal(reader.take(place, 1024), numbers(1024, seed))
    assert send(writer, numbers(4096)) == 8192, "an empty ring begins again at its beginning"
    assert torch.equal(reader.take(8192, 4096), numbers(4096))
    writer.close()
    reader.close()


def test_nothing_is_put_before_a_reader_is_there() -> None:
    writer = RingWriter(4096)
    assert writer.put(numbers(10)) is None
    reader = RingReader(os.dup(writer.descriptor), "cpu")
    assert writer.put(numbers(10)) == 0
    writer.close()
    reader.close()


def test_what_finds_no_room_goes_with_its_message_in_order(pair, places) -> None:
    sub, main = pair
    states = torch.randn(CAPACITY // 4 // 4, generator=torch.Generator().manual_seed(0)).view(1, 1, -1)
    for position in range(5):  # a quarter of the ring each; the pipe is too small for the last
        sub.send(DECIDER, ExitState(1, 1, position, states + position))
        sub.send(DECIDER, Candidate(1, 1, position, (7,)))
    sub.send(DECIDER, ExitState(1, 1, 5, torch.ones(1, 1, CAPACITY // 4 + 1)))
    arrived: list[Message] = []
    while len(arrived) < 11:
        sub.receive(0)
        arrived += [message] if (message := main.receive(0.01)) else []
    assert [(type(message), message.position) for message in arrived[:10]] == [
        (kind, position) for position in range(5) for kind in (ExitState, Candidate)
    ]
    assert all(torch.equal(message.hidden, states + message.position) for message in arrived[:10:2])
    assert arrived[10].hidden.numel() == CAPACITY // 4 + 1
    assert len(places) == 4


@pytest.mark.parametrize(
    ("position", "num_bytes"),
    [(64, 10), (128, 10), (2048, 10), (4095, 10), (8192, 10), (2**64 - 64, 10), (4096, 4097), (4096, 0), (192, 3905)],
)
def test_a_place_where_the_next_tensor_cannot_be_is_refused(position: int, num_bytes: int) -> None:
    writer, reader = ends_of(4096)
    for number in range(3):
        assert send(writer, numbers(64, number)) == 64 * number
    for number in range(3):
        reader.take(64 * number, 64)
    with pytest.raises(WireError, match=f"{num_bytes} bytes at {position} of a ring of 4096, which was read to 192"):
        reader.take(position, num_bytes)
    assert send(writer, numbers(64, 5)) == 4096, "the writer's next place is still right"
    assert torch.equal(reader.take(4096, 64), numbers(64, 5))
    writer.close()
    reader.close()


def notice(message: Message, position: int, num_bytes: int) -> bytes:
    header, _ = split(message)
    return struct.pack("<4sIQ", b"ppdr", len(header), num_bytes) + header + struct.pack("<Q", position)


STATE = ExitState(1, 1, 0, torch.ones(1, 1, 8))


@pytest.mark.parametrize("position", [64, 2**63])
@pytest.mark.parametrize("has_ring", [True, False])
def test_a_stream_that_names_such_a_place_is_closed(position: int, has_ring: bool, caplog) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, writer = Inlet(ours), RingWriter()
    arrived: deque[Message] = deque()
    with theirs, caplog.at_level(logging.WARNING):
        socket.send_fds(theirs, [notice(STATE, position, 32)], [writer.descriptor] if has_ring else [])
        assert not inlet.read(arrived)
    assert not arrived
    assert ("32 bytes at" if has_ring else "of a stream that has none") in caplog.text
    inlet.close()
    writer.close()


def test_a_size_that_does_not_fit_the_header_costs_that_message_alone(caplog) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, writer = Inlet(ours), RingWriter()
    arrived: deque[Message] = deque()
    with theirs, caplog.at_level(logging.WARNING):
        socket.send_fds(theirs, [notice(STATE, 0, 33) + notice(STATE, 64, 32)], [writer.descriptor])
        assert inlet.read(arrived)
    assert [type(message).__name__ for message in arrived] == ["Unreadable", "ExitState"]
    assert "a tensor whose bytes do not fit its shape" in caplog.text
    inlet.close()
    writer.close()


def unsealed() -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2**20)
    return descriptor


@pytest.mark.parametrize(
    "descriptor", [unsealed, lambda: os.open(__file__, os.O_RDONLY), lambda: os.open("/dev/zero", os.O_RDWR)]
)
def test_memory_that_may_shrink_is_no_ring(descriptor: Callable[[], int], caplog) -> None:
    """A reader would be killed where it has gone."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, number = Inlet(ours), descriptor()
    before = num_open()
    with theirs, caplog.at_level(logging.WARNING):
        socket.send_fds(theirs, [b"p"], [number])
        assert not inlet.read(deque())
    assert "no ring" in caplog.text
    inlet.close()
    os.close(number)
    assert num_open() == before - 3
    with pytest.raises(PermissionError):
        os.ftruncate(RingWriter(4096).descriptor, 0)


def test_several_descriptors_leave_none_open() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet, writer = Inlet(ours), RingWriter(4096)
    before = num_open()
    socket.send_fds(theirs, [b"p"], [writer.descriptor] * 9)
    assert inlet.read(deque())
    socket.send_fds(theirs, [b"p"], [writer.descriptor] * 9)
    assert inlet.read(deque())
    inlet.close()
    writer.close()
    theirs.close()
    assert num_open() <= before - 3


@pytest.mark.parametrize("released", [65, 2**63])
def test_a_reader_that_releases_what_it_has_not_been_given_loses_its_ring(pair, places, released: int, caplog) -> None:
    sub, main = pair
    sub.send(DECIDER, STATE)
    main.receive(DEADLINE)
    sub._outlets[DECIDER, False]._ring._memory.numbers[0] = released
    with caplog.at_level(logging.WARNING):
        for position in range(3):
            sub.send(DECIDER, ExitState(1, 1, position, torch.ones(1, 1, 8)))
    assert [main.receive(DEADLINE).position for _ in range(3)] == [0, 1, 2]
    assert caplog.messages == [f"left a ring: the reader has released {released} bytes of 64"]
    assert len(places) == 1


def test_a_notice_that_cannot_leave_gives_its_place_back(pair, places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message then goes as a whole, later: it may outlive its stream, and the stream's ring."""
    sub, main = pair
    outlet = sub._outlets[DECIDER, False]
    with monkeypatch.context() as patch:
        patch.setattr(outlet, "_send", lambda _: 0)
        patch.setattr(outlet, "_drain", lambda: None)
        sub.send(DECIDER, STATE)
    assert outlet.waiting
    sub.receive(0)
    assert main.receive(DEADLINE).hidden.shape == STATE.hidden.shape
    assert not places
    sub.send(DECIDER, STATE)
    main.receive(DEADLINE)
    assert places == [(0, 32)]


def test_a_reader_that_came_back_has_a_new_ring(pair, places, tmp_path: Path) -> None:
    sub, main = pair
    for position in range(3):
        sub.send(DECIDER, ExitState(1, 1, position, torch.ones(1, 1, 8)))
    main.close()  # it has taken none of them
    main = UnixEndpoint(str(tmp_path), DECIDER)
    arrived: list[int] = []
    for position in range(3, 9):
        sub.send(DECIDER, ExitState(1, 1, position, torch.ones(1, 1, 8)))
        sub.receive(0.02)
        arrived += [message.position] if (message := main.receive(0.02)) else []
    assert arrived[-1] == 8
    assert arrived == sorted(arrived)
    assert places
    assert places[0] == (0, 32)
    main.close()


def test_without_such_memory_tensors_go_with_their_messages(
    tmp_path: Path, places, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    sub, main = UnixEndpoint(str(tmp_path), 1, ring_from=1), UnixEndpoint(str(tmp_path), DECIDER)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sub.send(DECIDER, STATE)
            assert main.receive(DEADLINE).hidden.tolist() == STATE.hidden.tolist()
    assert caplog.messages == ["no shared memory for tensors, which go with their messages: Too many open files"]
    assert not places
    monkeypatch.delattr(os, "memfd_create")
    assert UnixEndpoint(str(tmp_path), 2, ring_from=1)._ring_from is None
    sub.close()
    main.close()


def test_a_stream_is_read_with_a_descriptor_in_its_first_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later reads use the quicker call."""
    looks: list[str] = []
    read_first = Inlet._read_first
    monkeypatch.setattr(Inlet, "_read_first", lambda *given: (looks.append("first"), read_first(*given))[1])
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inlet = Inlet(ours)
    for _ in range(3):
        theirs.send(b"p")
        assert inlet.read(deque())
    assert looks == ["first"]
    inlet.close()
    theirs.close()
