"""Tensors over `torch.distributed`: bits and order are kept, and a process that died is linked to again."""

import logging
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from collective_places import DEADLINE, Places, same, tensors
from grids import nightly
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.pipeline.messages import Candidate, End, Entries, ExitState, TensorAnnouncement
from ppd_runtime.pipeline.wire import split
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.transport import collective_links as links
from ppd_runtime.transport.collective_endpoint import CollectiveEndpoint
from ppd_runtime.transport.network import Network

PROMPT = [5, 9, 200, 31]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    places = Places(tmp_path)
    yield places
    for endpoint in places.endpoints.values():
        endpoint.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_and_order_stay_as_they_are(places: Places, dtype: torch.dtype) -> None:
    main, sub, client = (places.open(address) for address in (DECIDER, 1, CLIENT))
    places.wait_for_links()
    for round_number in range(8):
        there, back = [], []
        for at, tensor in enumerate(tensors(round_number, dtype)):
            there += [ExitState(DECIDER, 1, at, tensor), Candidate(DECIDER, 1, at, (3,))]
            back += [Candidate(1, 1, at, (3,)), Entries(1, 1, at, tensor)]
        for to, message in [(1, m) for m in there] + [(DECIDER, m) for m in back]:
            (main if to == 1 else sub).send(to, message)
        assert all(same(sub.receive(DEADLINE), message) for message in there)
        assert all(same(main.receive(DEADLINE), message) for message in back)
    assert all(endpoint._links[peer]._num_sent > 8 * 7 for endpoint, peer in ((main, 1), (sub, DECIDER)))
    client.send(DECIDER, there[0])
    assert same(main.receive(DEADLINE), there[0])
    assert not client._links


def _echo(folder: str, device: str, location: str, locations) -> None:
    """Another process: sends whatever it gets back, until told to end."""
    endpoint = CollectiveEndpoint(Network("collective", folder), 1, device)
    locations.put(endpoint.location)
    endpoint.introduce(DECIDER, location)
    while (message := endpoint.receive(60)) is not None and not isinstance(message, End):
        endpoint.send(DECIDER, message)
    endpoint.close()


def _two_devices() -> list[str]:
    """Of GPUs that two members of a group may have; empty where there are none."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return []
    if torch.cuda.device_count() > 1:
        return ["cuda:0", "cuda:1"]
    return ["cuda:0"] * 2 if torch.cuda.nccl.version() >= (2, 30) else []


@pytest.mark.cuda
def test_tensors_go_from_gpu_to_gpu_between_processes(tmp_path, monkeypatch):
    if not (devices := _two_devices()):
        pytest.skip("needs two GPUs, or one with NCCL 2.30 or newer")
    if len(set(devices)) == 1:
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    spawn = multiprocessing.get_context("spawn")
    main = CollectiveEndpoint(Network("collective", str(tmp_path)), DECIDER, devices[0])
    locations = spawn.Queue()
    peer = spawn.Process(target=_echo, args=(str(tmp_path), devices[1], main.location, locations), daemon=True)
    peer.start()
    main.introduce(1, locations.get(timeout=60))
    deadline = time.monotonic() + 60
    while not main._links[1].takes:
        assert main.receive(0.01) is None
        assert time.monotonic() < deadline, "the link did not open"
    for number in range(3):
        sent = [ExitState(1, 1, at, tensor.to(devices[0])) for at, tensor in enumerate(tensors(number))]
        for message in sent:
            main.send(1, message)
            answer = main.receive(DEADLINE)
            assert answer.hidden.device == torch.device(devices[0])
            assert same(answer, message)
    assert main._links[1]._num_received >= 3 * len(sent), "over the link"
    main.send(1, End(DECIDER, 1))
    peer.join(DEADLINE)
    assert peer.exitcode == 0
    main.close()


def test_a_tensor_that_does_not_come_costs_its_message_alone(
    places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(links, "_REST_S", 0.3)
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    message = ExitState(1, 1, 5, torch.ones(1, 1, 64))
    header, raw = split(message)
    sub._control.send(DECIDER, TensorAnnouncement(1, 1, sub._links[DECIDER].name, 0, raw.numel(), header))
    sub.send(DECIDER, End(1, 7))
    with caplog.at_level(logging.WARNING):
        assert main.receive(DEADLINE) == End(1, 7)
    assert "the link to worker 1 has not brought a tensor" in caplog.text
    assert main.receive(0) is None
    assert sub.receive(0.1) is None, "hears that the link is broken"
    exchange = ((sub, main, DECIDER), (main, sub, 1))
    for sender, receiver, to in exchange:
        sender.send(to, message)
        assert same(receiver.receive(DEADLINE), message), "tensors go with their messages now"
    broken = [main._links[1], sub._links[DECIDER]]
    places.wait_for_links()
    for sender, receiver, to in exchange:
        sender.send(to, message)
        assert same(receiver.receive(DEADLINE), message)
    links_now = [main._links[1], sub._links[DECIDER]]
    assert all(link.attempt == 1 and link._num_received for link in links_now), "over a new link"
    assert not set(broken) & set(links_now)


def test_one_end_that_has_broken_finds_the_other(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word of it is lost, and so is that of several attempts."""
    monkeypatch.setattr(links, "_REST_S", 0.02)
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    for _ in range(3):
        main._links[1]._break("is broken by the test", tell=False)
        time.sleep(0.1)
        assert main.receive(0) is None
    places.wait_for_links()
    message = ExitState(1, 1, 5, torch.ones(1, 1, 64))
    sub.send(DECIDER, message)
    assert same(main.receive(DEADLINE), message)
    assert main._links[1].name == sub._links[DECIDER].name
    assert main._links[1]._num_received == 1


def test_a_peer_that_does_not_look_blocks_nobody(places: Places) -> None:
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    sent = [Entries(DECIDER, 1, at, torch.full((50_000,), float(at))) for at in range(90)]
    began = time.monotonic()
    for message in sent:
        main.send(1, message)
    assert time.monotonic() - began < DEADLINE
    assert len(main._links[1]._sent) <= 33, "the rest went by ZeroMQ"
    received = [sub.receive(DEADLINE) for _ in sent]
    assert sorted(m.position for m in received) == list(range(90))
    assert all(same(m, sent[m.position]) for m in received)


def test_a_new_life_gets_a_link_of_its_own(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    main, sub = places.open(DECIDER), places.open(1)
    places.wait_for_links()
    threads = _threads()
    for incarnation in range(4):
        message = Entries(1, 1, incarnation, torch.full((3, 700 * (incarnation + 1)), float(incarnation)))
        sub.send(DECIDER, message)
        assert same(main.receive(DEADLINE), message)
        assert main._links[1]._num_received
        sub.close()
        for _ in range(3):
            main.send(1, message)  # to nobody
        sub = places.open(1)
        places.wait_for_links()
    sub.send(DECIDER, End(1, 9))
    assert main.receive(DEADLINE) == End(1, 9)
    deadline = time.monotonic() + DEADLINE
    while _threads() > threads + 2:
        assert time.monotonic() < deadline, "earlier incarnations' links are not closed"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("k", "workers", "dtype", "run_ahead"),
    [
        (1, 1, "bfloat16", True),
        pytest.param(1, 1, "float32", False, marks=nightly),
        pytest.param(3, 2, "float32", True, marks=nightly),
    ],
)
def test_tokens_are_ordinary_decodings(model_folder, k, workers, dtype, run_ahead):
    folder = str(model_folder("llama", num_layers=4))
    text = OrdinaryDecoding(folder, dtype=dtype).generate(PROMPT, max_new_tokens=60, ignore_eos=True).token_ids
    head = OracleHead(((*PROMPT, *text),), 0.7, 300)
    layout = {"k": k, "workers": workers, "dtype": dtype, "run_ahead": run_ahead, "exit_head": head}
    with PPDRuntime(folder, launcher="processes", speculation="always", transport="collective", **layout) as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        assert result.token_ids == text
        _wait_for_connections(workers + 1)


def test_the_dead_are_replaced_and_linked_to(model_folder):
    """Sub-processes and the main process, in the middle of a text; all of them meet again."""
    folder = str(model_folder("llama", num_layers=4))
    text = OrdinaryDecoding(folder, dtype="bfloat16").generate(PROMPT, max_new_tokens=100, ignore_eos=True).token_ids
    head, slow = OracleHead(((*PROMPT, *text),), 1.0, 300), EmulatedDevice(layer_ms=6.0)
    layout = {"k": 1, "dtype": "bfloat16", "exit_head": head, "emulate": slow}
    with PPDRuntime(folder, launcher="processes", speculation="always", transport="collective", **layout) as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=100, ignore_eos=True)
        events = [next(stream) for _ in range(5)]
        for name in ("sub-1", "main"):
            worker_processes()[name].kill()
            events += [next(stream) for _ in range(20)]
        events += list(stream)
        assert tuple(event.token_id for event in events) == text
        deadline = time.monotonic() + 120
        while not runtime.generate(PROMPT, max_new_tokens=40, ignore_eos=True).stats.hits:
            assert time.monotonic() < deadline, "nobody takes part again"
        _wait_for_connections(2)


def _threads() -> int:
    return psutil.Process().num_threads()


def _wait_for_connections(count: int) -> None:
    """Until so many workers hold both ends of two groups' connections for each pair of them."""
    workers, deadline = worker_processes().values(), time.monotonic() + DEADLINE
    assert len(workers) == count
    while True:
        ends = sum(c.status == psutil.CONN_ESTABLISHED for w in workers for c in w.net_connections("tcp"))
        if ends == 2 * count * (count - 1):
            return
        assert time.monotonic() < deadline, f"{ends} ends of connections"
        time.sleep(0.1)
