"""TCP with CURVE: only members of the run are heard, and one that comes back is found again."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import zmq

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.pipeline.messages import Candidate, End, Entries
from ppd_runtime.pipeline.wire import encode
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import make_networks, open_endpoint

LOOPBACK = "127.0.0.1"
ADDRESSES = [CLIENT, DECIDER, 1]
DEADLINE = 60.0  # that only a hang reaches


@pytest.fixture
def networks() -> dict[int, Network]:
    return make_networks("auto", "", LOOPBACK, ADDRESSES)


@pytest.fixture
def endpoints(networks: dict[int, Network]) -> Iterator[dict[int, Endpoint]]:
    """Everybody, introduced to everybody."""
    opened = {address: open_endpoint(network, address) for address, network in networks.items()}
    for endpoint in opened.values():
        for address, other in opened.items():
            endpoint.introduce(address, other.location)
    yield opened
    for endpoint in opened.values():
        endpoint.close()


def test_messages_arrive_in_order_and_entries_whole(endpoints: dict[int, Endpoint]) -> None:
    main, sub = endpoints[DECIDER], endpoints[1]
    entries = torch.randn(4, 20, 2, 8, 128, generator=torch.Generator().manual_seed(0))
    sub.send(DECIDER, Entries(1, 1, 7, entries))
    for position in range(500):
        sub.send(DECIDER, Candidate(1, 1, position, (3,)))
    received = [main.receive(DEADLINE) for _ in range(501)]
    assert [m.position for m in received if isinstance(m, Candidate)] == list(range(500))
    assert torch.equal(next(m.entries for m in received if isinstance(m, Entries)), entries)
    assert main.receive(0) is None


def test_ipv6_works_too() -> None:
    networks = make_networks("zeromq", "", "::1", [DECIDER, 1])
    main, sub = (open_endpoint(networks[address], address) for address in (DECIDER, 1))
    sub.introduce(DECIDER, main.location)
    sub.send(DECIDER, End(1, 1))
    assert main.location.startswith("tcp://[::1]:")
    assert main.receive(DEADLINE) == End(1, 1)
    sub.close()
    main.close()


def strangers_socket(context: zmq.Context, kind: str, network: Network, other: Network) -> zmq.Socket[bytes]:
    """Somebody who has heard of this process' place, but not of everything that it takes."""
    stranger = context.socket(zmq.PUSH)
    stranger.linger = 0
    fresh = zmq.curve_keypair()
    if kind != "no CURVE":
        stranger.curve_serverkey = fresh[0] if kind == "wrong server key" else network.keys.public.encode()
        stranger.curve_publickey, stranger.curve_secretkey = fresh
    if kind == "wrong server key":
        stranger.curve_publickey, stranger.curve_secretkey = other.keys.public.encode(), other.keys.secret.encode()
    if kind == "a listed public key":
        stranger.curve_publickey = other.keys.public.encode()
    return stranger


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        ("no CURVE", "somebody who does not know this process' key"),
        ("fresh keys", "127.0.0.1, whose key is not of this run"),
        ("wrong server key", "somebody who does not know this process' key"),
        ("a listed public key", "somebody who does not know this process' key"),
    ],
)
def test_a_stranger_gets_nothing_through_and_the_others_are_served(
    kind: str, who: str, endpoints: dict[int, Endpoint], networks: dict[int, Network], caplog: pytest.LogCaptureFixture
) -> None:
    main, sub = endpoints[DECIDER], endpoints[1]
    with zmq.Context() as context, caplog.at_level(logging.WARNING):
        strangers = [strangers_socket(context, kind, networks[DECIDER], networks[1]) for _ in range(3)]
        for stranger in strangers:
            stranger.connect(main.location)
            with contextlib.suppress(zmq.Again):  # it has been refused already, and has nobody to send to
                stranger.send_multipart(encode(End(1, 666)), zmq.NOBLOCK)
        deadline = time.monotonic() + DEADLINE
        while not caplog.messages and time.monotonic() < deadline:
            assert main.receive(0.05) is None
        sub.send(DECIDER, End(1, 1))
        assert main.receive(DEADLINE) == End(1, 1)
        assert main.receive(0.3) is None
        for stranger in strangers:
            stranger.close()
    assert caplog.messages == [f"refused {who} (1 refused so far)"], "said once, not for each"


def test_without_its_guard_a_process_lets_nobody_in(endpoints: dict[int, Endpoint]) -> None:
    """Were the thread that checks keys to end, that must not open the door."""
    main, sub = endpoints[DECIDER], endpoints[1]
    main._guard.stop()
    sub.send(DECIDER, End(1, 1))
    assert main.receive(0.5) is None
    main._guard = None


def test_whoever_takes_a_place_again_is_found_and_hears_nothing_old(
    endpoints: dict[int, Endpoint], networks: dict[int, Network], caplog: pytest.LogCaptureFixture
) -> None:
    main = endpoints[DECIDER]
    endpoints.pop(1).close()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            main.send(1, Entries(DECIDER, 1, 0, torch.ones(100)))
    assert set(caplog.messages) == {"peer 1 takes no messages: dropped a Entries"}, "memory is bounded"
    for request in range(100):
        main.send(1, End(DECIDER, request))
    again = endpoints[1] = open_endpoint(networks[1], 1)
    main.introduce(1, again.location)
    main.send(1, End(DECIDER, 1000))
    assert again.receive(DEADLINE) == End(DECIDER, 1000)
    assert again.receive(0.1) is None


def test_closing_leaves_no_thread_and_no_socket(networks: dict[int, Network]) -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(psutil.Process().net_connections())

    before = held()
    for _ in range(3):
        endpoint = open_endpoint(networks[DECIDER], DECIDER)
        assert held() == (before[0] + 1, before[1] + 1)
        endpoint.close()
        assert held() == before


def test_a_runtime_over_tcp_decodes_as_ever_and_finds_a_new_worker() -> None:
    ordinary = OrdinaryDecoding(threads=1)
    prompt = "def fibonacci(n):"
    expected = ordinary.generate(prompt, max_new_tokens=40).token_ids
    with PPDRuntime(k=1, launcher="processes", bind_interface=LOOPBACK) as runtime:
        assert runtime.generate(prompt, max_new_tokens=40).token_ids == expected
        processes = [post.handle.process for post in runtime._workers.supervisor._posts.values()]
        secrets = [network.keys.secret for network in runtime._workers._networks.values()]
        for process in processes:
            shown = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            assert not any(secret.encode() in shown for secret in secrets)
        assert {c.laddr.ip for p in processes for c in psutil.Process(p.pid).net_connections("tcp")} == {LOOPBACK}
        processes[1].kill()
        assert runtime.generate(prompt, max_new_tokens=40).token_ids == expected
        deadline = time.monotonic() + 60
        while runtime._workers.supervisor.starts(1) < 2:
            runtime._workers.supervisor.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        deadline, took_part = time.monotonic() + 60, False
        while not took_part:
            again = runtime.generate(prompt, max_new_tokens=40)
            assert again.token_ids == expected
            took_part = any(passes > 0 for passes in again.stats.sub_layer_passes)
            assert time.monotonic() < deadline, "the new one takes no part"
