"""A process that is killed with kill -9 at one end of a ring: its successor has a new one, and the memory is gone."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from ppd_runtime.pipeline.messages import End, PromptStates
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.transport.unix import UnixEndpoint

DEADLINE = 20.0
SIZE = 50_000
FORK = multiprocessing.get_context("fork")


def states(position: int) -> torch.Tensor:
    """The tensor of a message, which its position tells."""
    return torch.arange(position, position + SIZE, dtype=torch.float32).view(1, 1, -1)


def write_for_ever(folder: str) -> None:
    """A worker that sends the main process one tensor after the other."""
    torch.set_num_threads(1)  # the threads of OpenMP are not in a fork
    endpoint = UnixEndpoint(folder, 1, ring_from=1)
    for position in range(10**9):
        endpoint.send(DECIDER, PromptStates(1, 1, 0, position, states(position)))
        endpoint.receive(0.001)


def read_for_ever(folder: str) -> None:
    """A worker that takes tensors and tells the main process the position of each that was right."""
    torch.set_num_threads(1)
    endpoint = UnixEndpoint(folder, 1)
    while True:
        message = endpoint.receive(DEADLINE)
        assert isinstance(message, PromptStates)
        assert torch.equal(message.hidden, states(message.position))
        endpoint.send(DECIDER, End(1, message.position))


def num_rings() -> int:
    """How many rings this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:ppd-ring")


@pytest.fixture
def main(tmp_path: Path) -> Iterator[UnixEndpoint]:
    """The main process' endpoint, all of whose tensors go through rings; afterwards nothing is left."""
    before = set(Path("/dev/shm").iterdir()), num_rings()
    with closing(UnixEndpoint(str(tmp_path), DECIDER, ring_from=1)) as endpoint:
        yield endpoint
    assert {path.name for path in tmp_path.iterdir()} <= {"worker-1"}
    assert (set(Path("/dev/shm").iterdir()), num_rings()) == before


def start(run: Callable[[str], None], folder: Path) -> BaseProcess:
    process = FORK.Process(target=run, args=(str(folder),), daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join(DEADLINE)
    assert process.exitcode == -9


def test_a_writer_that_is_killed(main: UnixEndpoint, tmp_path: Path) -> None:
    for turn in range(3):
        process = start(write_for_ever, tmp_path)
        for position in range(20 + 10 * turn):
            message = main.receive(DEADLINE)
            assert message == PromptStates(1, 1, 0, position, message.hidden)
            assert torch.equal(message.hidden, states(position))
        assert num_rings() > 0
        kill(process)
        while main.receive(0.05):
            pass
        assert num_rings() == 0, "the end of the stream is the end of its ring"


def test_a_reader_that_is_killed(main: UnixEndpoint, tmp_path: Path) -> None:
    position = 0
    for _ in range(3):
        main.introduce(1, "")
        process = start(read_for_ever, tmp_path)
        told = 0
        deadline = time.monotonic() + DEADLINE
        while told < 20 and time.monotonic() < deadline:
            main.send(1, PromptStates(DECIDER, 1, 0, position, states(position)))
            position += 1
            while main.receive(0.002):
                told += 1
        assert told >= 20
        assert num_rings() == 1
        kill(process)
        for _ in range(30):  # nobody takes them
            main.send(1, PromptStates(DECIDER, 1, 0, position, states(position)))
            position += 1
        assert num_rings() == 0
        (tmp_path / "worker-1").unlink()
