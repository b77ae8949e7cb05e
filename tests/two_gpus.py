"""A stand-in for `torch.cuda` with two GPUs: what decides which GPU, which stream and which memory work goes to.

As in CUDA, each thread has a current device and, on each device, a current stream. A kernel goes to the current stream
of its tensors' device, whatever the current device is; while that stream captures, it is recorded and does not run. A
capture without a stream of its own is on the one default stream of all captures, which lies on whichever device was
current when it was first needed; before it the device is waited for. There is one capture at a time, and none on a
device's default stream. Recordings of a stream share a workspace, which goes with the first of them that goes. The
allocator serves a capture from its memory pool until the capture ends; an end that fails leaves it there.
A stream that waits for a transfer under way does so until that has arrived; no other can wait here, so waiting for
such a stream, or for its device, is an error that says so.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Kernel = Callable[[], None]


class Stream:
    """A queue of one device; it runs what it gets at once, unless it captures."""

    def __init__(self, gpus: "TwoGpus", device: Any = None) -> None:
        self.gpus, self.device = gpus, torch.device("cuda", gpus.index_of(device))
        self.capturing: Graph | None = None
        self.workspace = {"is there": True}
        self.waited_for: list[Stream] = []
        self.waits_for: list[Any] = []
        """Transfers, such as `nccl.Receive`, in the order in which they were asked for."""
        gpus.streams.append(self)

    def synchronize(self) -> None:
        """Wait for what has been asked for up to now."""
        if not all(transfer.has_arrived for transfer in self.waits_for):
            raise RuntimeError("this would wait for a transfer that is under way")

    def wait_stream(self, other: "Stream") -> None:
        """Nothing is ever left to wait for; who waits for whom is noted."""
        self.waited_for.append(other)


class Event:
    """A moment of the stream that is current when it is recorded."""

    def __init__(self, gpus: "TwoGpus") -> None:
        self._gpus = gpus

    def record(self, stream: Stream | None = None) -> None:
        """Behind all that the stream has been asked for."""
        self._behind = list((stream or self._gpus.current_stream()).waits_for)

    def query(self) -> bool:
        """Whether the stream has come so far."""
        return all(transfer.has_arrived for transfer in self._behind)

    def synchronize(self) -> None:
        """Wait until it has."""
        if not self.query():
            raise RuntimeError("this would wait for a transfer that is under way")


class Runtime:
    """The functions of CUDA's own library for memory of the host: which is page-locked, by address."""

    def __init__(self) -> None:
        self.page_locked: dict[int, int] = {}
        self.most_bytes = 2**40

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        """Page-lock memory; 2 if that is too much, 712 if it is page-locked already."""
        if num_bytes > self.most_bytes or address in self.page_locked:
            return 712 if address in self.page_locked else 2
        self.page_locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """Give it back; 713 if it was not page-locked."""
        return 0 if self.page_locked.pop(address, None) else 713


class Graph:
    """Kernels that were captured, to be replayed over the same memory."""

    def __init__(self, gpus: "TwoGpus") -> None:
        self._gpus, self._kernels = gpus, list[Kernel]()
        self.stream: Stream | None = None
        self._workspace = {"is there": True}

    def capture_begin(self, pool: int, **_: object) -> None:
        """Capture on the current device's current stream, into a memory pool."""
        self.stream = self._gpus.current_stream()
        if self.stream in self._gpus.defaults.values():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        if any(stream.capturing for stream in self._gpus.streams):
            raise RuntimeError("only one capture may be underway at a time")
        self.stream.capturing, self._workspace = self, self.stream.workspace
        self._pool = self.stream.device.index, pool
        self._gpus.allocating.append(self._pool)

    def capture_end(self) -> None:
        """Fails where the test says so, before the allocator leaves the pool, as PyTorch's does."""
        assert self.stream
        assert self.stream is self._gpus.current_stream(), "capture must end on the same stream it began on"
        self.stream.capturing = None
        if self._gpus.captures_fail:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._gpus.end_allocating(*self._pool)

    def add(self, kernel: Kernel) -> None:
        """One more, that does not run now."""
        self._kernels.append(kernel)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was captured, of which PyTorch only warns."""
        return not self._kernels

    def replay(self) -> None:
        """All kernels again; none where the memory that they work in has gone."""
        self._gpus.replays += 1
        for kernel in self._kernels if self._workspace["is there"] else []:
            kernel()

    def __del__(self) -> None:
        if self.stream:
            self._workspace["is there"] = False
            self.stream.workspace = {"is there": True}


class TwoGpus:
    """The devices; `torch.cuda`'s functions are this object's as long as `two_gpus` lasts."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._default_capture_stream: Stream | None = None
        self.streams: list[Stream] = []
        self.defaults = {index: Stream(self, index) for index in range(2)}
        """Each device's own stream, which a thread has until it takes another."""
        self.captures_fail = False
        self.replays = 0
        self.pools = 0
        self.allocating: list[tuple[int, int]] = []
        """Devices and pools from which the allocator serves captures."""
        self.released: list[tuple[int, int]] = []
        """Pools that were given back by hand."""
        self.library = Runtime()
        self.graphs: list[Graph] = []
        """Of this test; a test that wants them to go empties it."""

    def index_of(self, device: Any) -> int:
        """Of a device, a number, or the current one."""
        index = device if isinstance(device, int) else device and torch.device(device).index
        return self.current_device() if index is None else index

    def current_device(self) -> int:
        """This thread's, as a number."""
        return getattr(self._threads, "device", 0)

    def set_device(self, device: Any) -> None:
        """Make it this thread's."""
        self._threads.device = self.index_of(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device: Any = None) -> Stream:
        """This thread's on a device."""
        index = self.index_of(device)
        return vars(self._threads).get(f"stream{index}", self.defaults[index])

    def set_stream(self, stream: Stream) -> None:
        """Make it this thread's on its device, and its device the current one."""
        self.set_device(stream.device)
        setattr(self._threads, f"stream{stream.device.index}", stream)

    def stream(self, stream: Stream) -> "_OnStream":
        """`torch.cuda.stream`."""
        return _OnStream(self, stream)

    def synchronize(self, device: Any = None) -> None:
        """Wait for all of a device's streams: CUDA refuses that while something captures there."""
        index = self.index_of(device)
        for stream in self.streams:
            if stream.device.index == index:
                stream.synchronize()
        if any(graph.stream and graph.stream.capturing and graph.stream.device.index == index for graph in self.graphs):
            raise RuntimeError("operation not permitted when stream is capturing")

    def new_pool(self) -> int:
        """`torch.cuda.graph_pool_handle`."""
        self.pools += 1
        return self.pools

    def end_allocating(self, device: int, pool: int) -> None:
        """`torch._C._cuda_endAllocateToPool`, which refuses a pool that serves no capture."""
        if (device, pool) not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove((device, pool))

    def new_graph(self) -> Graph:
        """`torch.cuda.CUDAGraph`."""
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    def graph(self, graph: Graph, stream: Stream | None = None, capture_error_mode: str = "global") -> "_Capture":
        """`torch.cuda.graph`."""
        if stream is None:
            self._default_capture_stream = self._default_capture_stream or Stream(self)
        return _Capture(self, graph, stream or self._default_capture_stream)

    def launch(self, device: torch.device, kernel: Kernel) -> None:
        """What an operator does with its tensors' device."""
        capturing = self.current_stream(device).capturing
        capturing.add(kernel) if capturing else kernel()


class _OnStream:
    """A generator would restore what was before even where it is forgotten in the middle."""

    def __init__(self, gpus: TwoGpus, stream: Stream) -> None:
        self._gpus, self._stream = gpus, stream

    def __enter__(self) -> None:
        self._before = self._gpus.current_stream(self._stream.device), self._gpus.current_stream()
        self._gpus.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        for stream in self._before:
            self._gpus.set_stream(stream)


class _Capture:
    """Leaves the thread on its stream where the capture fails, as PyTorch does."""

    def __init__(self, gpus: TwoGpus, graph: Graph, stream: Stream | None) -> None:
        assert stream
        self._gpus, self._graph, self._on = gpus, graph, gpus.stream(stream)

    def __enter__(self) -> None:
        self._gpus.synchronize()
        self._on.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()
        self._on.__exit__(*error)


def on_gpu(tensor: Tensor, index: int) -> Tensor:
    """The same numbers in memory that says it were a GPU's."""
    return tensor.as_subclass(_TENSORS[index])


def _tensors_of(index: int) -> Any:
    said = {"device": torch.device("cuda", index), "is_cuda": True, "is_cpu": False}
    members: dict[str, Any] = {name: property(lambda _, value=value: value) for name, value in said.items()}
    members["cpu"] = lambda tensor: tensor.as_subclass(Tensor)
    members["record_stream"] = lambda tensor, stream: None
    members["numpy"] = _no_array
    return type(f"OnGpu{index}", (Tensor,), members)


def _no_array(tensor: Tensor) -> None:
    """As PyTorch refuses it."""
    raise TypeError(f"can't convert {tensor.device} device type tensor to numpy")


_TENSORS = [_tensors_of(index) for index in range(2)]


class NewTensors(TorchFunctionMode):
    """Has a thread's new tensors be the GPUs' where they are asked for there, and notes those in pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        self.pinned += bool(given.pop("pin_memory", False))
        place = torch.device(given["device"]) if given.get("device") is not None else torch.device("cpu")
        if place.type != "cuda":
            return function(*args, **given)
        index = torch.cuda.current_device() if place.index is None else place.index
        return on_gpu(function(*args, **given | {"device": "cpu"}), index)


_WAIT = {"tolist", "item", "__int__", "__float__", "__bool__"}
"""What waits for a GPU's numbers, besides `cpu`."""


class Waits(TorchFunctionMode):
    """Counts the waits for a GPU, and the numbers that are sent there."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.sent = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.waits += name in _WAIT and isinstance(args[0], Tensor) and args[0].is_cuda
        self.sent += name == "tensor" and torch.device((kwargs or {}).get("device") or "cpu").type == "cuda"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def two_gpus() -> Iterator[TwoGpus]:
    """Have `torch.cuda` be the stand-in. New tensors are the GPUs' in the thread that calls this only."""
    gpus = TwoGpus()
    names = ("current_device", "set_device", "device", "current_stream", "set_stream", "stream", "synchronize", "graph")
    with pytest.MonkeyPatch.context() as patch, NewTensors():
        for name in names:
            patch.setattr(torch.cuda, name, getattr(gpus, name))
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(gpus, device))
        patch.setattr(torch.cuda, "Event", lambda: Event(gpus))
        patch.setattr(torch.cuda, "CUDAGraph", gpus.new_graph)
        patch.setattr(torch.cuda, "cudart", lambda: gpus.library)
        patch.setattr(torch.cuda, "graph_pool_handle", gpus.new_pool)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", gpus.end_allocating)
        patch.setattr(torch._C, "_cuda_releasePool", lambda *pool: gpus.released.append(pool))
        yield gpus
