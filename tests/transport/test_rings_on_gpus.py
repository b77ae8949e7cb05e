"""What GPUs change, over a stand-in for `torch.cuda`: page-locked rings, copies under way, and who spins."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rings import ends_of, numbers, send
from two_gpus import on_gpu, two_gpus

from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import open_endpoint, spins
from ppd_runtime.transport.unix import UnixEndpoint


def test_a_gpus_copy_is_awaited_before_its_place_is_given_back() -> None:
    with two_gpus() as gpus:
        writer, reader = ends_of(4096, "cuda:1")
        send(writer, on_gpu(numbers(2048), 0))
        transfer = SimpleNamespace(has_arrived=False)
        gpus.defaults[1].waits_for.append(transfer)
        arrived = reader.take(0, 2048)
        assert (arrived.device, arrived.is_cuda) == (torch.device("cuda", 1), True)
        assert torch.equal(arrived.cpu(), numbers(2048))
        assert writer.put(numbers(2049)) is None, "the copy is under way"
        transfer.has_arrived = True
        reader.release()
        assert writer.put(numbers(2049)) == 4096
        assert sorted(gpus.library.page_locked.values()) == [4096, 4096], "each end's, once"
        writer.close()
        reader.close()
        assert not gpus.library.page_locked


def test_memory_of_cpus_is_not_page_locked() -> None:
    with two_gpus() as gpus:
        writer, reader = ends_of(4096)
        send(writer, numbers(10))
        reader.take(0, 10)
        assert not gpus.library.page_locked
        writer.close()
        reader.close()


def test_where_cuda_page_locks_nothing_copies_go_on(caplog) -> None:
    with two_gpus() as gpus, caplog.at_level(logging.WARNING):
        gpus.library.most_bytes = 0
        writer, reader = ends_of(4096, "cuda:0")
        for number in range(5):
            position = send(writer, on_gpu(numbers(3000, number), 1))
            assert torch.equal(reader.take(position, 3000).cpu(), numbers(3000, number))
        writer.close()
        reader.close()
    assert len(caplog.messages) == 2, "each end says so once"


@pytest.mark.parametrize(
    ("transport", "device", "ring_from"),
    [
        ("auto", "cpu", None),
        ("unix", "cpu", None),
        ("unix", "cuda:1", 2**16 + 1),
        ("auto", "cuda", 2**16 + 1),
        ("ring", "cpu", 1),
        ("ring", "cuda:0", 1),
    ],
)
def test_rings_are_for_gpus(tmp_path: Path, transport: str, device: str, ring_from: int | None) -> None:
    endpoint = open_endpoint(Network(transport, str(tmp_path)), 1, device=device)
    assert isinstance(endpoint, UnixEndpoint)
    assert endpoint._ring_from == ring_from
    endpoint.close()


@pytest.mark.parametrize(
    ("own_core", "device", "num_workers", "num_cores", "expected"),
    [
        (True, "cpu", 2, 2, True),
        (False, "cpu", 2, 64, False),
        (False, "cuda", 2, 3, True),
        (False, "cuda:3", 4, 5, True),
        (False, "cuda:0", 4, 4, False),
        (False, "cuda:0", 1, 1, False),
    ],
)
def test_who_spins(own_core: bool, device: str, num_workers: int, num_cores: int, expected: bool) -> None:
    assert spins(own_core, device, num_workers, num_cores) == expected


def test_a_spinning_process_polls_for_two_milliseconds(tmp_path: Path) -> None:
    for spinning, seconds in ((True, 0.002), (False, 0.0)):
        endpoint = open_endpoint(Network("unix", str(tmp_path)), 1, spinning, "cuda:0")
        assert isinstance(endpoint, UnixEndpoint)
        assert endpoint._spin_s == seconds
        endpoint.close()
