"""One-way latency of a message between two processes, by size and transport, and what sending costs the sender.

    python -m benchmarks.hop --count 300 --json figures.json

Each process stays on a core of its own where there are two, as a worker does; with tensors of GPUs on none. Both read
the same clock, so a latency is one way: from before the send to when the receiver holds the decoded message. Between
two messages the sender pauses: a receiver that looks for messages for a while before it sleeps is found awake after
the short pause and asleep after the long one.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.recording import Figures, names, new_parser, positive, run, table_of, whole_numbers
from ppd_runtime.host import available_cores
from ppd_runtime.launch.cpu_affinity import assign_cores, on_cores
from ppd_runtime.launch.socket_folder import SocketFolder
from ppd_runtime.pipeline.messages import End, ExitState
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.transport import Endpoint
from ppd_runtime.transport.network import Network
from ppd_runtime.transport.sockets import open_endpoint, spins

_RECEIVER, _WARM_UP, _DEADLINE_S = 1, 20, 30.0
_LOOK_EVERY_S = 0.005
_SETTLE_S = 25.0  # at the most, for a link to open
_TRANSPORTS = ("unix", "ring", "zeromq", "collective")


@dataclass(frozen=True)
class Series:
    """Messages of one kind, sent one after the other."""

    transport: str
    num_bytes: int
    pause_ms: int
    count: int
    device: str = "cpu"
    """Where the tensor lies before, and has to be before its message counts as there."""


def measure(options: argparse.Namespace) -> Figures:
    """A row for each transport, size and pause."""
    kinds = itertools.product(options.transports, options.sizes, options.pauses_ms)
    return {"rows": measure_all([Series(*kind, options.count) for kind in kinds])}


def measure_all(several: Sequence[Series]) -> list[Figures]:
    """A row for each series, to one other process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return [_row(series, pool) for series in several]


def table(figures: Figures) -> str:
    """The rows in Markdown."""
    kinds = {"transport": "transport", "num_bytes": "bytes", "pause_ms": "pause, ms"}
    times = {"median_us": "one way, µs: median", "p99_us": "p99", "sender_us": "sender's own time, µs"}
    return table_of(figures["rows"], **kinds, **times, count="messages")


def _row(series: Series, pool: ProcessPoolExecutor) -> Figures:
    here, there = assign_cores(2, 1, device=series.device)
    with SocketFolder() as folder:
        arriving = pool.submit(arrivals, series, folder.path, there)
        began, ended = departures(series, folder.path, here)
        arrived = arriving.result()
    latencies = [1e6 * (a - b) for a, b in zip(arrived, began, strict=True)][_WARM_UP:]
    own = [1e6 * (e - b) for e, b in zip(ended, began, strict=True)][_WARM_UP:]
    return asdict(series) | {
        "median_us": statistics.median(latencies),
        "p99_us": statistics.quantiles(latencies, n=100)[-1],
        "sender_us": statistics.median(own),
    }


def departures(series: Series, folder: str, cores: Sequence[int]) -> tuple[list[float], list[float]]:
    """Send a series; the moments before and after each send."""
    began, ended = [], []
    torch.set_num_threads(1)  # a worker's; a second one would wait for the same core in each copy of 32 KB and more
    with on_cores(cores), _met(series, folder, DECIDER, _RECEIVER, cores) as endpoint:
        _await_receiver(endpoint)
        for number in range(series.count + _WARM_UP):
            message = ExitState(DECIDER, 1, number, torch.zeros(1, 1, series.num_bytes // 4, device=series.device))
            _wait_for(series.device)
            endpoint.receive(0)  # no message comes, but what its peer has taken is heard of
            began.append(time.perf_counter())
            endpoint.send(_RECEIVER, message)
            ended.append(time.perf_counter())
            time.sleep(series.pause_ms / 1000)
        _await_receiver(endpoint)  # what still waits to leave leaves here
    return began, ended


def arrivals(series: Series, folder: str, cores: Sequence[int]) -> list[float]:
    """Receive a series in this process; the moment of each message, by position."""
    moments: dict[int, float] = {}
    on_gpu = 0
    torch.set_num_threads(1)
    with on_cores(cores), _met(series, folder, _RECEIVER, DECIDER, cores) as endpoint:
        deadline = time.monotonic() + _SETTLE_S
        while getattr(endpoint, "is_opening", False) and time.monotonic() < deadline:
            endpoint.receive(_LOOK_EVERY_S)  # no message comes, but the collective transport's link opens
        endpoint.send(DECIDER, End(_RECEIVER, 1))
        while len(moments) < series.count + _WARM_UP:
            message = endpoint.receive(_DEADLINE_S)
            if isinstance(message, ExitState) and series.device != "cpu":
                on_gpu += message.hidden.is_cuda
                message.hidden.to(series.device)
                _wait_for(series.device)
            now = time.perf_counter()
            if not isinstance(message, ExitState):
                raise TimeoutError(f"{series}: the sender has said nothing for {_DEADLINE_S:.0f} s")
            moments[message.position] = now
        endpoint.send(DECIDER, End(_RECEIVER, 1))
    check_link(series, on_gpu)
    return [moments[number] for number in sorted(moments)]


def check_link(series: Series, on_gpu: int) -> None:
    """Raise RuntimeError where the collective transport's messages have come in its stead by ZeroMQ, from which the
    tensors of so few arrive on the GPU.
    """
    if series.transport == "collective" and series.device != "cpu" and on_gpu < series.count:
        raise RuntimeError(f"NCCL has brought {on_gpu} of {series.count} tensors, the others came by ZeroMQ")


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.current_stream(device).synchronize()


def _await_receiver(endpoint: Endpoint) -> None:
    if endpoint.receive(_DEADLINE_S) is None:
        raise TimeoutError(f"the receiver has said nothing for {_DEADLINE_S:.0f} s")


@contextlib.contextmanager
def _met(series: Series, folder: str, own: int, peer: int, cores: Sequence[int]) -> Iterator[Endpoint]:
    """A place in the network, once its peer is there; each tells the other its location through a file."""
    spinning = spins(bool(cores), series.device, 2, available_cores())
    opened = open_endpoint(Network(series.transport, folder), own, spinning, series.device)
    with contextlib.closing(opened) as endpoint:
        written = Path(folder) / f"writing-{own}"
        written.write_text(endpoint.location)
        written.rename(Path(folder) / f"location-{own}")
        deadline = time.monotonic() + _DEADLINE_S
        while not (there := Path(folder) / f"location-{peer}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {peer} has not come for {_DEADLINE_S:.0f} s")
            time.sleep(0.001)
        endpoint.introduce(peer, there.read_text())
        yield endpoint


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--transports", type=names(_TRANSPORTS), default=_TRANSPORTS, help="with commas")
    options.add_argument("--sizes", type=whole_numbers, default=[1024, 10240, 65536, 409600], help="bytes, with commas")
    options.add_argument("--pauses-ms", type=whole_numbers, default=[1, 5], help="with commas")
    options.add_argument("--count", type=positive, default=300, help="messages of each kind")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
