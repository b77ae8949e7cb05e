"""All transports keep what `Endpoint` promises; those between processes also over garbage, absent peers, restarts."""

import contextlib
import logging
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from ppd_runtime.pipeline.messages import Candidate, End, Entries, ExitState, HeadStart, Token, Unreadable
from ppd_runtime.pipeline.wire import encode
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.unix import UnixEndpoint
from ppd_runtime.transport.zeromq import ZmqEndpoint

ADDRESSES = [CLIENT, DECIDER, 1, 2]
DEADLINE = 20.0
AT_ONCE_S = 8.0
"""What takes no time takes less on any machine; a wait that must run out takes longer."""
Connect = Callable[[int], Endpoint]


def zmq_endpoint(folder: str, address: int) -> ZmqEndpoint:
    return ZmqEndpoint(Network(folder=folder), address)


def ring_endpoint(folder: str, address: int) -> UnixEndpoint:
    return UnixEndpoint(folder, address, ring_from=1)


@pytest.fixture(params=["local", "unix", "ring", "zeromq"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Opens an endpoint at an address of one network; closes all of them at the end."""
    network = LocalNetwork(ADDRESSES)
    opened: list[Endpoint] = []

    def open_endpoint(address: int) -> Endpoint:
        between_processes = {"unix": UnixEndpoint, "ring": ring_endpoint, "zeromq": zmq_endpoint}.get(request.param)
        opened.append(between_processes(str(tmp_path), address) if between_processes else network.endpoint(address))
        return opened[-1]

    yield open_endpoint
    for endpoint in opened:
        endpoint.close()


@contextlib.contextmanager
def timed(least: float = 0.0) -> Iterator[None]:
    """At least so long, and less than somebody who waits for what does not come."""
    began = time.perf_counter()
    yield
    assert least <= time.perf_counter() - began <= AT_ONCE_S


def positions(endpoint: Endpoint, count: int) -> list[int]:
    received = [endpoint.receive(DEADLINE) for _ in range(count)]
    return [message.position for message in received if isinstance(message, Candidate)]


def test_messages_arrive_in_order(connect: Connect) -> None:
    main, sub = connect(DECIDER), connect(1)
    for i in range(2000):
        sub.send(DECIDER, Candidate(1, 7, i, (i,)))
    assert positions(main, 2000) == list(range(2000))
    assert main.receive(0) is None


def test_each_address_gets_its_own_messages(connect: Connect) -> None:
    endpoints = {address: connect(address) for address in ADDRESSES}
    for to in ADDRESSES:
        endpoints[DECIDER].send(to, Token(DECIDER, 1, 5, 100 + to, 0))
    for address, endpoint in endpoints.items():
        assert endpoint.receive(DEADLINE) == Token(DECIDER, 1, 5, 100 + address, 0)
        assert endpoint.receive(0) is None


def test_one_message_to_many_and_different_ones_in_turn(connect: Connect) -> None:
    """Encoding a message once for all its addresses must not mix it up with the next."""
    main, first, second = connect(DECIDER), connect(1), connect(2)
    one, other = End(DECIDER, 1), End(DECIDER, 2)
    for message in (one, other, one):
        for rank in (1, 2):
            main.send(rank, message)
    for endpoint in (first, second):
        assert [endpoint.receive(DEADLINE) for _ in range(3)] == [one, other, one]


def test_large_tensors_arrive_whole(connect: Connect) -> None:
    main, sub = connect(DECIDER), connect(1)
    entries = torch.randn(40, 2, 8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    for position in range(10):
        sub.send(DECIDER, Entries(1, 1, position, entries[position:]))
    for position in range(10):
        assert torch.equal(main.receive(DEADLINE).entries, entries[position:])


def test_timeouts_are_kept(connect: Connect) -> None:
    main = connect(DECIDER)
    with timed():
        assert main.receive(0) is None
    with timed():
        assert main.receive(1e-6) is None
    with timed(0.045):
        assert main.receive(0.05) is None


def test_what_is_there_is_received_without_waiting(connect: Connect) -> None:
    main, sub = connect(DECIDER), connect(1)
    sub.send(DECIDER, End(1, 1))
    assert main.receive(DEADLINE) == End(1, 1)
    sub.send(DECIDER, End(1, 2))
    sub.send(DECIDER, End(1, 3))
    assert main.receive(DEADLINE) == End(1, 2)
    time.sleep(0.2)  # the second may be on its way yet
    with timed():
        assert main.receive(0) == End(1, 3)


@pytest.mark.parametrize("timeout", [DEADLINE, None])
def test_a_message_ends_the_waiting(connect: Connect, timeout: float | None) -> None:
    main = connect(DECIDER)

    def send_later() -> None:
        time.sleep(0.05)
        sub = connect(1)  # an endpoint belongs to the thread that made it
        sub.send(DECIDER, End(1, 9))

    thread = threading.Thread(target=send_later)
    thread.start()
    with timed():
        assert main.receive(timeout) == End(1, 9)
    thread.join()


def test_messages_wait_for_whoever_comes_later(connect: Connect) -> None:
    sub = connect(1)
    with timed():
        for i in range(100):
            sub.send(DECIDER, Candidate(1, 1, i, (0,)))
    main = connect(DECIDER)
    assert sub.receive(0.05) is None, "what could not leave leaves while the sender waits for something"
    assert positions(main, 100) == list(range(100))


def test_what_was_sent_before_closing_arrives(connect: Connect) -> None:
    main, sub = connect(DECIDER), connect(1)
    for i in range(500):
        sub.send(DECIDER, Candidate(1, 1, i, (0,)))
    sub.close()
    assert positions(main, 500) == list(range(500))


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A stranger's socket, connected to the main process' address in `tmp_path`."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path / 'worker-0'}")
    yield socket
    context.destroy(linger=0)


def test_garbage_is_logged_and_left_out(
    tmp_path: Path, raw: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    main = zmq_endpoint(str(tmp_path), DECIDER)
    good = encode(Candidate(1, 1, 5, (6,)))
    garbage = [
        [b""],
        [b"\x00" * 10_000],
        [b"hello", b"world"],
        [b""] * 50,
        [*good, b"more"],
        [good[0][:-1]],
        [b"\x91" * 100_000],
        encode(Entries(1, 1, 0, torch.ones(4)))[:1],
    ]
    with caplog.at_level(logging.WARNING):
        for i, frames in enumerate(garbage):
            raw.send_multipart(frames)
            raw.send_multipart(encode(Candidate(1, 1, i, (6,))))
        received = [main.receive(DEADLINE) for _ in range(len(garbage) + 2)]
    assert [one.position for one in received if isinstance(one, Candidate)] == list(range(len(garbage)))
    assert [one for one in received if isinstance(one, Unreadable)] == [
        Unreadable(1, 1, "Candidate", "a Candidate with more frames than it has tensors"),
        Unreadable(1, 1, "Entries", "a Entries needs one frame for its tensor"),
    ]
    assert main.receive(0) is None
    main.close()
    assert len(caplog.records) == len(garbage)


def test_garbage_does_not_put_off_the_deadline(tmp_path: Path) -> None:
    main = zmq_endpoint(str(tmp_path), DECIDER)
    stopped = threading.Event()

    def send_garbage() -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(f"ipc://{tmp_path / 'worker-0'}")
            while not stopped.wait(0.05):
                socket.send(b"garbage")

    thread = threading.Thread(target=send_garbage)
    thread.start()
    threading.Timer(2 * AT_ONCE_S, stopped.set).start()
    try:
        with timed(0.15):
            assert main.receive(0.2) is None
    finally:
        stopped.set()
        thread.join()
        main.close()


def test_a_peer_that_takes_nothing_blocks_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sub = zmq_endpoint(str(tmp_path), 1)
    with timed(), caplog.at_level(logging.WARNING):
        for i in range(2010):
            sub.send(DECIDER, Candidate(1, 1, i, (0,)))
        sub.send(2, End(1, 1))
    assert caplog.messages
    assert set(caplog.messages) == {"peer 0 takes no messages: dropped a Candidate"}
    main, other = zmq_endpoint(str(tmp_path), DECIDER), zmq_endpoint(str(tmp_path), 2)
    assert other.receive(DEADLINE) == End(1, 1)
    assert positions(main, 1000) == list(range(1000)), "the oldest are kept"
    for endpoint in (sub, main, other):
        endpoint.close()


def test_closing_does_not_wait_long_for_an_absent_peer(connect: Connect) -> None:
    sub = connect(1)
    sub.send(DECIDER, End(1, 1))
    with timed():
        sub.close()


@pytest.mark.parametrize("kind", [UnixEndpoint, ring_endpoint, zmq_endpoint])
def test_an_address_can_be_taken_again(tmp_path: Path, kind: Callable[[str, int], Endpoint]) -> None:
    sub = kind(str(tmp_path), 1)
    for request in range(3):
        main = kind(str(tmp_path), DECIDER)
        deadline = time.monotonic() + DEADLINE
        arrived = None
        while arrived is None and time.monotonic() < deadline:
            sub.send(DECIDER, End(1, request))  # what is on its way while its address is away may be lost
            arrived = main.receive(0.1)
            while arrived is not None and arrived.request != request:
                arrived = main.receive(0.1)
        assert arrived == End(1, request)
        main.close()
    sub.close()


@pytest.mark.parametrize("kind", [UnixEndpoint, ring_endpoint, zmq_endpoint])
def test_two_runtimes_in_two_folders_do_not_hear_each_other(
    tmp_path: Path, kind: Callable[[str, int], Endpoint]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir(mode=0o700)
    mains = [kind(str(folder), DECIDER) for folder in folders]
    clients = [kind(str(folder), CLIENT) for folder in folders]
    for number, client in enumerate(clients):
        client.send(DECIDER, End(CLIENT, number))
    for number, main in enumerate(mains):
        assert main.receive(DEADLINE) == End(CLIENT, number)
        assert main.receive(0.05) is None
    for endpoint in mains + clients:
        endpoint.close()


@pytest.fixture
def unix(tmp_path: Path) -> Iterator[Callable[..., UnixEndpoint]]:
    """Opens Unix endpoints in one folder; closes all of them at the end."""
    opened: list[UnixEndpoint] = []

    def open_endpoint(address: int, spin_s: float = 0.0) -> UnixEndpoint:
        opened.append(UnixEndpoint(str(tmp_path), address, spin_s))
        return opened[-1]

    yield open_endpoint
    for endpoint in opened:
        endpoint.close()


def on_the_stream(frames: list[bytes | memoryview]) -> bytes:
    return b"".join([struct.pack("<4sIQ", b"ppd1", len(frames[0]), sum(map(len, frames[1:]))), *frames])


def stranger(tmp_path: Path, *parts: bytes) -> socket.socket:
    """Somebody who writes whatever it likes to the main process' socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(tmp_path / "worker-0"))
    for part in parts:
        connection.sendall(part)
    return connection


def test_what_is_no_message_is_left_out_and_the_stream_goes_on(
    unix: Callable[..., UnixEndpoint], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main = unix(DECIDER)
    good = encode(Candidate(1, 1, 5, (6,)))
    garbage = [[b""], [b"\x00" * 10_000], [b"hello", b"world"], [*good, b"more"], [good[0][:-1]], [b"\x91" * 100_000]]
    parts = [
        on_the_stream(frames) + on_the_stream(encode(Candidate(1, 1, i, (6,)))) for i, frames in enumerate(garbage)
    ]
    with stranger(tmp_path, *parts[:2]), stranger(tmp_path, *parts[2:]), caplog.at_level(logging.WARNING):
        received = [main.receive(DEADLINE) for _ in range(len(garbage) + 1)]
    assert sorted(one.position for one in received if isinstance(one, Candidate)) == list(range(len(garbage)))
    reason = "a Candidate with more frames than it has tensors"
    assert [one for one in received if isinstance(one, Unreadable)] == [Unreadable(1, 1, "Candidate", reason)]
    assert len(caplog.records) == len(garbage)


@pytest.mark.parametrize(
    "prefix",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<4sIQ", b"ppd2", 10, 0),
        struct.pack("<4sIQ", b"ppd1", 2**31, 0),
        struct.pack("<4sIQ", b"ppd1", 10, 2**60),
    ],
)
def test_a_stream_of_something_else_is_closed_and_others_are_served(
    unix: Callable[..., UnixEndpoint], tmp_path: Path, prefix: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    main, sub = unix(DECIDER), unix(1)
    with stranger(tmp_path, prefix) as connection, caplog.at_level(logging.WARNING):
        assert main.receive(0.05) is None
        assert connection.recv(1) == b"", "closed"
    assert "prefix" in caplog.text
    sub.send(DECIDER, End(1, 1))
    assert main.receive(DEADLINE) == End(1, 1)


def test_a_promise_of_two_gigabytes_takes_no_memory(unix: Callable[..., UnixEndpoint], tmp_path: Path) -> None:
    main = unix(DECIDER)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with stranger(tmp_path, struct.pack("<4sIQ", b"ppd1", 100, 2**31) + b"x" * 100_000):
        assert main.receive(0.1) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


def test_a_message_may_come_in_any_pieces(unix: Callable[..., UnixEndpoint], tmp_path: Path) -> None:
    main = unix(DECIDER)
    generator = random.Random(0)
    sent = [Entries(1, 1, i, torch.full((generator.randrange(1, 60_000),), float(i))) for i in range(12)]
    stream = b"".join(on_the_stream(encode(message)) for message in sent)
    received: list[Entries] = []
    with stranger(tmp_path) as connection:
        while stream:
            size = generator.choice([1, 7, 16, 1000, 65_536, 100_000])
            connection.sendall(stream[:size])
            stream = stream[size:]
            while (message := main.receive(0)) is not None:
                received.append(message)
    assert [message.position for message in received] == list(range(12))
    assert all(torch.equal(a.entries, b.entries) for a, b in zip(received, sent, strict=True))


def test_a_message_larger_than_the_pipe_leaves_while_its_sender_is_busy(unix: Callable[..., UnixEndpoint]) -> None:
    """A prompt of a million tokens reaches a waiting sub-process although the main process goes on computing."""
    ready, received = threading.Event(), []

    def wait_for_it() -> None:
        sub = unix(1)
        ready.set()
        received.append(sub.receive(DEADLINE))

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    ready.wait()
    tensor = torch.arange(1_250_000)[None].float()  # 5 MB, as a prompt of a million tokens is
    unix(DECIDER).send(1, ExitState(DECIDER, 1, 0, tensor))
    thread.join()
    assert torch.equal(received[0].hidden, tensor)


def test_a_hidden_state_does_not_queue_behind_entries(unix: Callable[..., UnixEndpoint]) -> None:
    main, sub = unix(DECIDER), unix(1)
    sub.send(DECIDER, Entries(1, 1, 0, torch.ones(4_000_000)))  # 16 MB, more than any pipe takes
    sub.send(DECIDER, HeadStart(1, 1, 1, (5,), torch.ones(1, 1, 64)))
    assert isinstance(main.receive(DEADLINE), HeadStart)
    arrived = None
    while arrived is None:
        sub.receive(0)
        arrived = main.receive(0)
    assert isinstance(arrived, Entries)


def test_a_stopped_peer_costs_milliseconds_and_bounded_memory(
    unix: Callable[..., UnixEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    main, sub = unix(DECIDER), unix(1)
    entries = torch.ones(250_000)  # 1 MB
    with timed(), caplog.at_level(logging.WARNING):
        for i in range(100):
            sub.send(DECIDER, Entries(1, 1, i, entries))
    assert set(caplog.messages) == {"peer 0 takes no messages: dropped a Entries"}
    received, quiet = [], 0
    while quiet < 5:
        assert sub.receive(0) is None, "a chance to send more"
        message = main.receive(0.02)
        quiet = quiet + 1 if message is None else 0
        received += [message.position] if message else []
    assert received == list(range(len(received))), "the oldest, in order"
    assert len(received) > 60


def test_a_peer_that_came_back_gets_whole_messages(unix: Callable[..., UnixEndpoint]) -> None:
    """Killed in the middle of a message: its successor hears the next one from its beginning."""
    main, sub = unix(DECIDER), unix(1)
    sub.send(DECIDER, Entries(1, 1, 0, torch.ones(4_000_000)))
    assert main.receive(0) is None
    main.close()
    main = unix(DECIDER)
    sub.send(DECIDER, Entries(1, 1, 1, torch.ones(10)))
    arrived = None
    deadline = time.monotonic() + DEADLINE
    while arrived is None and time.monotonic() < deadline:
        sub.receive(0)
        arrived = main.receive(0.01)
    assert isinstance(arrived, Entries)
    assert arrived.position == 1


def test_who_spun_in_vain_sleeps_at_once_for_some_waits(unix: Callable[..., UnixEndpoint]) -> None:
    main = unix(DECIDER, spin_s=10.0)
    looks: list[int | None] = []
    look = main._take
    main._take = lambda timeout_ms: (looks.append(timeout_ms), look(timeout_ms))  # type: ignore[method-assign]
    spun = []
    for _ in range(8):
        looks.clear()
        assert main.receive(0.1) is None
        spun.append(looks.count(0) > 1)
    assert spun == [True, False, True, False, False, False, True, False]


def test_spinning_gives_way_to_sleep(unix: Callable[..., UnixEndpoint]) -> None:
    main = unix(DECIDER, spin_s=0.002)
    began = time.thread_time()
    assert main.receive(1.0) is None
    assert time.thread_time() - began < 0.1
