"""CUDA graphs: the launches of a pass, recorded once and replayed as one.

On a GPU launching a small layer takes longer than running it. A recording holds only for the memory that it was made
with. Compiled passes have one for each layer range, tree of tokens, number of attended rows and set of caches. Padded
passes read from their inputs where caches are, so one serves all passes of a layer range up to a length.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_MOST_RECORDINGS = 64
_PASSES_EACH = 16
"""Making a recording takes as long as several launched passes. Below this many passes per kept recording, no new one
replaces them; this happens if more requests take turns than can be kept."""
Launch = Callable[..., Tensor]
"""Runs a pass: tensors on the GPU, the first hidden states `[1, tokens, hidden_size]`, to states."""


def current_device(device: str | torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one while the block lasts; nothing for a CPU.

    Each thread has its own current device, at first the first GPU. Work without an explicit device runs there, such as
    the launches of a recording.
    """
    place = torch.device(device)
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    output: Tensor


class Recordings:
    """Recorded passes of one stage. If a pass cannot be recorded, it and all later ones are launched.

    Before use, a recording is replayed over poisoned memory and must give the launched pass's bits: an empty one, or
    one made on another device, would leave the old contents without an error.
    """

    _capturing = threading.Lock()
    """One capture at a time in a process: PyTorch allows no more."""

    def __init__(self) -> None:
        self.made = 0
        """Recordings made so far; a pass that makes one takes as long as several."""
        self._recordings: dict[Hashable, _Recording] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._works, self._passes = True, 0

    def run(
        self,
        key: Hashable,
        inputs: Sequence[Tensor],
        launch: Launch,
        written: Callable[[], Sequence[Tensor]] = tuple,
    ) -> Tensor:
        """Run the pass over `inputs`; `key` holds all else that tells recordings apart. The result is the caller's.

        `written`: contiguous tensors that a pass writes besides its result, such as caches' rows.
        """
        self._passes += 1
        recording = self._recordings.get(key)
        if recording is None:
            if not self._works or not self._has_room():
                return launch(*inputs)
            try:
                recording = self._record(key, inputs, launch, written())
            except RuntimeError as error:
                self._works = False
                self._recordings.clear()
                logger.warning("CUDA graphs are left out: %s", " ".join(str(error).split())[:200])
                return launch(*inputs)
        for ours, given in zip(recording.inputs, inputs, strict=True):
            ours.copy_(given)
        recording.graph.replay()
        return recording.output.clone()

    def _has_room(self) -> bool:
        """Whether one more recording fits; clears all others if there are too many and they were of use."""
        if len(self._recordings) < _MOST_RECORDINGS:
            return True
        if self._passes < _MOST_RECORDINGS * _PASSES_EACH:
            return False
        self._recordings.clear()
        self._passes = 0
        return True

    def _record(self, key: Hashable, inputs: Sequence[Tensor], launch: Launch, written: Sequence[Tensor]) -> _Recording:
        """Launch once to warm up, which writes what the replay will write again, then record and try the recording."""
        self.made += 1
        own = [given.clone() for given in inputs]
        with self._capturing, _aside(self._stream(own[0].device)):
            expected = launch(*own).clone()
            graph, output = _captured(lambda: launch(*own))
        recording = _Recording(graph, own, output)
        _check(recording, expected, written)
        self._recordings[key] = recording
        return recording

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """This device's own stream to capture on: freeing a stream's last recording frees the memory that others on the
        same stream work in.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


@contextlib.contextmanager
def _aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make the stream this thread's and its device current; restore both afterwards, also after an error.

    Its work runs after the replaced stream's, and that stream's next work after it. Nothing waits for the device.
    """
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def _captured(launch: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record the launches on the current stream; returns the graph and its output.

    `torch.cuda.graph` would first wait for the whole device, and wait again to free memory: while a tensor is being
    received, as long as its peer takes to send it.
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")  # links may be opening in other threads
        output = launch()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture has failed
            _end(graph, pool)
        raise
    _end(graph, pool)
    return graph, output


def _end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture into a memory pool.

    If the capture is invalid, PyTorch raises before its allocator leaves the pool. The allocator would then think of a
    capture for as long as the process lasts, so the pool is given back here.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # it raised later, and the pool goes with the graph
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise


def _check(recording: _Recording, expected: Tensor, written: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a replay does not write what the launched pass has written."""
    wanted = [expected, *(tensor.clone() for tensor in written)]
    got = [recording.output, *written]
    for tensor in got:
        tensor.fill_(math.nan)
    recording.graph.replay()
    if not all(torch.equal(_bits(ours), _bits(theirs)) for ours, theirs in zip(got, wanted, strict=True)):
        for ours, theirs in zip(got, wanted, strict=True):
            ours.copy_(theirs)
        raise RuntimeError("a recording does not give what the pass gave that it was made of")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
