"""Recordings are made on their tensors' device and tried before they are used, on two GPUs that are stand-ins."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from recorded_passes import SIZE, attention, caches_in, states
from torch import Tensor
from two_gpus import NewTensors, TwoGpus, two_gpus

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.stage.caches import ATTENDED_ROWS, PreallocatedLayer
from ppd_runtime.models.stage.graphs import Recordings, current_device
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import Shutdown
from ppd_runtime.settings.layouts import CLIENT, DECIDER, Layout, PaperLayout, StagedLayout
from ppd_runtime.transport.local import LocalNetwork
from ppd_runtime.workers import roles, worker
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker


@pytest.fixture
def gpus() -> Iterator[TwoGpus]:
    with two_gpus() as both:
        yield both


def doubling(gpus: TwoGpus, lost: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """A pass that gives twice the states plus the position; `lost`: its kernel goes where no capture sees it."""

    def launch(hidden: Tensor, position: Tensor) -> Tensor:
        output = torch.empty(hidden.shape, device=hidden.device)

        def kernel() -> None:
            output.copy_(2 * hidden + position)

        if lost and gpus.current_stream(hidden.device).capturing:
            return output
        gpus.launch(hidden.device, kernel)
        return output

    return launch


def placed(hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """A pass's inputs: states and their position."""
    return hidden, torch.full((1,), position, device=hidden.device)


def check(recordings: Recordings, launch: Callable[[Tensor, Tensor], Tensor], index: int, key: str = "it") -> None:
    for position in range(3):
        hidden = states(index, position)
        assert torch.equal(recordings.run(key, placed(hidden, position), launch), 2 * hidden + position)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
def test_a_recording_is_made_where_its_tensors_are(
    gpus: TwoGpus, index: int, current: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever device is current; that stays current, with its stream."""
    gpus.set_device(current)
    streams = [gpus.current_stream(device) for device in (0, 1)]
    check(Recordings(), doubling(gpus), index)
    (graph,) = gpus.graphs
    assert not graph.is_empty
    assert graph.stream.device.index == index
    assert gpus.replays == 4, "one to try it"
    assert gpus.current_device() == current
    assert [gpus.current_stream(device) for device in (0, 1)] == streams
    assert not caplog.records


def test_an_empty_recording_is_left_out(gpus: TwoGpus, caplog: pytest.LogCaptureFixture) -> None:
    check(Recordings(), doubling(gpus, lost=True), 1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "CUDA graphs are left out: a recording does not give what the pass gave that it was made of"
    assert len(gpus.graphs) == 1, "no other one is tried"


def test_after_a_capture_that_fails_passes_go_where_they_went_before(
    gpus: TwoGpus, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.captures_fail = True
    streams = [gpus.current_stream(device) for device in (0, 1)]
    check(Recordings(), doubling(gpus), 1)
    assert "CUDA graphs are left out: operation failed due to a previous error" in caplog.text
    assert not gpus.allocating, "the allocator would think of a capture for good"
    assert gpus.released == [(1, 1)]
    assert [gpus.current_stream(device) for device in (0, 1)] == streams
    assert gpus.current_device() == 0


def test_a_launch_that_fails_in_a_capture_ends_the_capture(gpus: TwoGpus, caplog: pytest.LogCaptureFixture) -> None:
    """What it has failed with is said, and the stream captures no more."""
    double = doubling(gpus)

    def launch(hidden: Tensor, position: Tensor) -> Tensor:
        if gpus.current_stream(hidden.device).capturing:
            raise RuntimeError("this kernel waits, which a capture cannot")
        return double(hidden, position)

    check(Recordings(), launch, 1)
    assert "CUDA graphs are left out: this kernel waits, which a capture cannot" in caplog.text
    assert not any(stream.capturing for stream in gpus.streams)
    assert not gpus.allocating
    assert not gpus.released, "the pool goes with its graph"


@pytest.mark.parametrize("captures_fail", [False, True])
def test_a_launch_and_the_end_of_its_capture_may_both_fail(
    gpus: TwoGpus, captures_fail: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever fails first is told, and the allocator leaves the pool."""
    gpus.captures_fail, double = captures_fail, doubling(gpus)

    def launch(hidden: Tensor, position: Tensor) -> Tensor:
        if gpus.current_stream(hidden.device).capturing:
            raise RuntimeError("this kernel waits, which a capture cannot")
        return double(hidden, position)

    check(Recordings(), launch, 1)
    assert "CUDA graphs are left out: this kernel waits, which a capture cannot" in caplog.text
    assert not gpus.allocating
    assert gpus.released == [(1, 1)] * captures_fail


def test_passes_and_recordings_go_one_after_the_other(gpus: TwoGpus) -> None:
    """By events of the two streams: the warming pass reads what came before it, later passes what it has written."""
    check(Recordings(), doubling(gpus), 1)
    (graph,) = gpus.graphs
    assert graph.stream.waited_for == [gpus.defaults[1]]
    assert gpus.defaults[1].waited_for == [graph.stream]


def test_one_stages_recordings_go_without_those_of_another(gpus: TwoGpus) -> None:
    """Two stages of a process on one GPU: what goes with the first one's recordings is not the second one's."""
    first, second = Recordings(), Recordings()
    check(first, doubling(gpus), 0)
    check(second, doubling(gpus), 0)
    del first
    del gpus.graphs[0]
    check(second, doubling(gpus), 0)


def test_more_recordings_than_are_kept(gpus: TwoGpus) -> None:
    recordings = Recordings()
    for number in range(70):
        for _ in range(6):
            check(recordings, doubling(gpus), 1, f"capacity {number}")
        if number == 64:
            assert len(recordings._recordings) == 1
            gpus.graphs.clear()
    check(recordings, doubling(gpus), 1, "capacity 0")


def test_requests_that_take_turns_do_not_record_each_pass_anew(gpus: TwoGpus) -> None:
    """More of them than recordings are kept: some of their passes are launched as they are."""
    recordings, passes = Recordings(), 0
    for _ in range(20):
        for request in range(100):
            hidden = states(1, request)
            assert torch.equal(recordings.run(request, placed(hidden, 3), doubling(gpus)), 2 * hidden + 3)
            passes += 1
    assert len(gpus.graphs) <= 64 + passes / 16


def test_threads_capture_one_after_the_other(gpus: TwoGpus, caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch allows one at a time in a process."""
    meeting = threading.Barrier(2)

    def serve(number: int) -> bool:
        recordings, double = Recordings(), doubling(gpus)

        def launch(hidden: Tensor, position: Tensor) -> Tensor:
            time.sleep(0.001)  # the other thread's turn
            return double(hidden, position)

        meeting.wait(10)
        with NewTensors():
            inputs = [placed(states(1, i), 0) for i in range(40)]
            return all(torch.equal(recordings.run(i, some, launch), 2 * some[0]) for i, some in enumerate(inputs))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(serve, range(2)))
    assert not caplog.records


@pytest.mark.parametrize("forgets_to_write", [False, True])
def test_a_pass_writes_its_caches_when_it_is_replayed(
    gpus: TwoGpus, forgets_to_write: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The launched pass has left the same rows there: without looking, a recording that lacks them gives its states."""
    found = []
    for passes in (LaunchedPasses(torch.device("cuda", 1)), None):
        torch.manual_seed(0)
        caches = [PreallocatedLayer(ATTENDED_ROWS + 8, None) for _ in range(2)]
        for cache in caches:
            cache.write(*torch.randn(2, 1, 1, ATTENDED_ROWS - 3, SIZE))
        parts = [attention(gpus, forgets_to_write) for _ in caches]
        of_case = []
        for position in range(ATTENDED_ROWS - 3, ATTENDED_ROWS + 3):  # past a step of the attended rows
            hidden = states(1, position)
            if passes:
                hidden = passes.run("it", parts, [0, 1], hidden, caches)
            else:
                for part, cache in zip(parts, caches, strict=True):
                    hidden = part.code.run([hidden, torch.tensor([position]), *cache.next_rows()])[0]
            of_case += [hidden.clone(), *(rows.clone() for cache in caches for rows in cache.rows)]
        found.append(of_case)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert len(caplog.records) == forgets_to_write
    assert len(gpus.graphs) == (1 if forgets_to_write else 2)


def test_requests_in_turn_each_write_and_read_their_own_caches(gpus: TwoGpus) -> None:
    """A third one, whose caches lie where an ended one's lay, goes on with the recording that is there."""
    passes, parts = LaunchedPasses(torch.device("cuda", 1)), [attention(gpus, False) for _ in range(2)]
    first, second, third = torch.randn(3, 2, 2, ATTENDED_ROWS, 1, SIZE, generator=torch.Generator().manual_seed(0))
    place, plain = torch.empty_like(first), [first.clone(), second.clone(), third.clone()]

    def run(number: int, caches: list[PreallocatedLayer], position: int) -> None:
        hidden = expected = states(1, position)
        found = passes.run("it", parts, [0, 1], hidden, caches)
        for part, rows in zip(parts, plain[number], strict=True):
            expected = part.code.run([expected, torch.tensor([position]), *rows])[0]
        assert torch.equal(found, expected)
        assert all(
            torch.equal(*pair)
            for c, rows in zip(caches, plain[number], strict=True)
            for pair in zip(c.rows, rows, strict=True)
        )

    of_first, of_second = caches_in(place.copy_(first), 9), caches_in(second, 20)
    for step in range(3):
        run(0, of_first, 9 + step)
        run(1, of_second, 20 + step)
    of_third = caches_in(place.copy_(third), 31)
    for step in range(3):
        run(1, of_second, 23 + step)
        run(2, of_third, 31 + step)
    assert len(gpus.graphs) == 2


def test_compiled_code_runs_with_its_device_current(gpus: TwoGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the current device's stream; ordinary decoding is no worker, which has its device current anyway."""
    seen = []

    def run(inputs: list[Tensor]) -> list[Tensor]:
        seen.append(gpus.current_device())
        return [inputs[0].clone()]

    class Loader:
        """Leaves its device current, as PyTorch's does."""

        def __init__(self, path: str, name: str, one: bool, runners: int, index: int) -> None:
            gpus.set_device(index)
            self.run = run

        def get_metadata(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", Loader)
    passes = LaunchedPasses(torch.device("cuda", 1))
    part = passes.part(passes.load(Path("code.pt2")), [])
    assert gpus.current_device() == 0
    caches = [PreallocatedLayer(ATTENDED_ROWS, None)]
    caches[0].write(*torch.randn(2, 1, 1, 3, SIZE))
    passes.head(part, states(1), (1, SIZE))
    passes._recordings = None
    passes.run("it", [part], [0], states(1), caches)
    assert seen == [1, 1]


class _Watching:
    """An endpoint that notes which device is current where its worker serves."""

    def __init__(self, gpus: TwoGpus, network: LocalNetwork) -> None:
        self._gpus, self._inside = gpus, network.endpoint(DECIDER)
        self.devices: list[int] = []

    def receive(self, timeout: float | None) -> object:
        self.devices.append(self._gpus.current_device())
        return self._inside.receive(timeout)


@pytest.mark.parametrize("layout", [PaperLayout(1, 2, 1), StagedLayout((2,), 1, 1)])
def test_a_worker_loads_and_serves_with_its_device_current(
    gpus: TwoGpus, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """In whatever thread that is; the program's own threads keep theirs. A stage tries its passes where it loads."""
    info, loading = describe(str(model_folder("llama"))), []

    def load(*arguments: object) -> object:
        loading.append(gpus.current_device())
        return load_stage(*(argument if argument != "cuda:1" else "cpu" for argument in arguments))

    def rows(*arguments: object) -> TreeRange:
        loading.append(gpus.current_device())
        return TreeRange(*arguments)

    monkeypatch.setattr(worker, "load_stage", load)
    monkeypatch.setattr(roles, "TreeRange", rows)
    made = Worker(WorkerSpec(DECIDER, layout, info, torch.float32, "cuda:1", 1))
    assert loading == [1] * (1 + len(layout.cuts))
    assert gpus.current_device() == 0
    network = LocalNetwork([CLIENT, DECIDER])
    network.endpoint(CLIENT).send(DECIDER, Shutdown(CLIENT, 0))
    endpoint = _Watching(gpus, network)
    thread = threading.Thread(target=made.serve, args=(endpoint,))
    thread.start()
    thread.join(10)
    assert endpoint.devices == [1]


def test_nothing_is_made_current_for_a_cpu(gpus: TwoGpus) -> None:
    gpus.set_device(1)
    with current_device("cpu"):
        assert gpus.current_device() == 1
    with current_device(torch.device("cuda")):
        assert gpus.current_device() == 1, "a GPU without a number is the current one"
