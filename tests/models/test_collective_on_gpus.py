"""Links between GPUs wait for nothing but their own tensors, and end where they do not open; NCCL is a stand-in."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from two_gpus import TwoGpus, on_gpu, two_gpus

from ppd_runtime.models.stage.graphs import Recordings
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.transport import collective_groups as groups
from ppd_runtime.transport.collective_groups import Channel, CollectiveBackend, PairStore

NUM_BYTES = 8
UNDEFINED = -(2**31)
"""NCCL's word for a setting that is not made."""


class Receive:
    """A transfer that arrives when the test says so."""

    def __init__(self, has_arrived: bool) -> None:
        self.has_arrived = has_arrived

    def wait(self) -> None:
        """Have the current stream wait."""
        torch.cuda.current_stream().waits_for.append(self)


class Nccl:
    """A group whose peer greets at once, and sends what the test says; without a peer its start takes for ever, or as
    long as it was told to try."""

    has_peer = True

    class Options:
        """Those that are read here."""

        def __init__(self, **_: object) -> None:
            self.config = SimpleNamespace(blocking=UNDEFINED)

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self._options, self.receives = options, list[Receive]()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Receive:
        """Nothing is kept of it."""
        self._start()
        return Receive(has_arrived=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Receive:
        """The first is the greeting."""
        self._start()
        self.receives.append(Receive(has_arrived=not self.receives))
        return self.receives[-1]

    def abort(self) -> None:
        """Nothing is under way."""

    def _start(self) -> None:
        if not self.has_peer:
            assert self._options.config.blocking == 0, "this thread would be stuck for good"
            assert 0 < float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) <= 60
            raise RuntimeError("NCCL timeout in: start")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoGpus]:
    for name in (*groups._LIVE_AND_LET_DIE, "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # to be as it was afterwards
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(Nccl, "has_peer", True)
    with two_gpus() as both:
        yield both


def connect(backend: CollectiveBackend) -> Channel:
    return backend.connect(PairStore(lambda key, value: None), 0)


def test_a_link_does_not_wait_for_another_ones_tensor(gpus: TwoGpus) -> None:
    first, second = (connect(backend) for backend in [CollectiveBackend("cuda:1", "")] * 2)
    overdue, quick = first.receive(NUM_BYTES), second.receive(NUM_BYTES)
    assert not quick.is_here(0)
    second._in.receives[-1].has_arrived = True
    assert quick.is_here(0)
    assert not overdue.is_here(0)


def test_a_pass_does_not_wait_for_a_tensor_that_is_under_way(gpus: TwoGpus) -> None:
    """One of another link, or of a peer that is gone. Waiting for the whole device would: the stand-in says so."""
    overdue = connect(CollectiveBackend("cuda:1", "")).receive(NUM_BYTES)
    LayerRange._wait_for_device(SimpleNamespace(_on_cuda=True, device=torch.device("cuda:1")))
    with pytest.raises(RuntimeError, match="would wait for a transfer"):
        torch.cuda.synchronize("cuda:1")
    assert not overdue.is_here(0)


def test_a_recording_does_not_wait_for_a_tensor_that_is_under_way(
    gpus: TwoGpus, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch's own way to record waits for the whole device: with a dead peer, until its link is given up."""
    overdue = connect(CollectiveBackend("cuda:1", "")).receive(NUM_BYTES)

    def launch(hidden: Tensor, position: Tensor) -> Tensor:
        output = torch.zeros(hidden.shape, device=hidden.device)
        gpus.launch(hidden.device, lambda: output.copy_(2 * hidden + position))
        return output

    recordings, hidden, position = Recordings(), on_gpu(torch.ones(1, 1, 4), 1), on_gpu(torch.tensor([3]), 1)
    assert torch.equal(recordings.run("it", (hidden, position), launch), torch.full((1, 1, 4), 5.0))
    assert [graph.is_empty for graph in gpus.graphs] == [False]
    assert not caplog.records
    assert not overdue.is_here(0)
    stalls = pytest.raises(RuntimeError, match="would wait for a transfer")
    with torch.cuda.device("cuda:1"), stalls, torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def test_a_start_whose_peer_has_died_ends(gpus: TwoGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nccl, "has_peer", False)
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        connect(CollectiveBackend("cuda:1", ""))
