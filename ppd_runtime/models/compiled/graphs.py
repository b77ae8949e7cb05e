"""CUDA graphs: the launches of a pass, recorded once and replayed as one.

On a GPU launching a small layer takes longer than running it. A recording holds for the very memory that it was made
with, so there is one for each layer range, tree of tokens, number of attended rows and set of caches.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_MOST_RECORDINGS = 64
_PASSES_EACH = 16
"""To make a recording takes as long as several launched passes: while there were fewer passes than these for each of
those that are kept, no further one takes their place. So it is where more requests take turns than can be kept."""
Launch = Callable[[Tensor, Tensor], Tensor]
"""Runs a pass: hidden states `[1, tokens, hidden_size]` and their position `[1]`, both on the GPU, in; states out."""


def current_device(device: str | torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one while the block lasts; nothing for a CPU.

    Each thread has a current device of its own, the first GPU to begin with, and what is not told where to go goes
    there, such as the launches of a recording.
    """
    place = torch.device(device)
    return torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    position: Tensor
    output: Tensor


class Recordings:
    """Recorded passes of one stage. Where a pass cannot be recorded, it and all later ones are launched as they are.

    Before it is used a recording is replayed over poisoned memory, and has to give what the launched pass gave, to the
    last bit: one that is empty, or made on another device, gives what was there before, without an error.
    """

    _capturing = threading.Lock()
    """One capture at a time in a process: PyTorch allows no more."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._works, self._passes = True, 0

    def run(
        self, key: Hashable, hidden: Tensor, position: int, launch: Launch, written: Sequence[Tensor] = ()
    ) -> Tensor:
        """The pass over `hidden`; `key` tells all that makes a recording another one. The result is the caller's.

        `written` are what a pass writes besides its result, such as caches' rows, each contiguous.
        """
        where = torch.full((1,), position, dtype=torch.int64, device=hidden.device)
        self._passes += 1
        recording = self._recordings.get(key)
        if recording is None:
            if not self._works or not self._has_room():
                return launch(hidden, where)
            try:
                recording = self._record(key, hidden, where, launch, written)
            except RuntimeError as error:
                self._works = False
                self._recordings.clear()
                logger.warning("CUDA graphs are left out: %s", " ".join(str(error).split())[:200])
                return launch(hidden, where)
        recording.hidden.copy_(hidden)
        recording.position.copy_(where)
        recording.graph.replay()
        return recording.output.clone()

    def _has_room(self) -> bool:
        """Whether there may be one more recording; all others go where there are many and have been of use."""
        if len(self._recordings) < _MOST_RECORDINGS:
            return True
        if self._passes < _MOST_RECORDINGS * _PASSES_EACH:
            return False
        self._recordings.clear()
        self._passes = 0
        return True

    def _record(
        self, key: Hashable, hidden: Tensor, position: Tensor, launch: Launch, written: Sequence[Tensor]
    ) -> _Recording:
        """Launch once to warm up, which writes what the replay will write again, then record and try the recording."""
        hidden, position = hidden.clone(), position.clone()
        with self._capturing, _aside(self._stream(hidden.device)):
            expected = launch(hidden, position).clone()
            graph, output = _captured(lambda: launch(hidden, position))
        recording = _Recording(graph, hidden, position, output)
        _check(recording, expected, written)
        self._recordings[key] = recording
        return recording

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream to capture on, of this device alone: with the last of a stream's recordings goes the
        memory that others of the same stream work in.
        """
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


@contextlib.contextmanager
def _aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """The stream is this thread's, its device the current one; then both are what they were, also behind an error.

    It goes on behind the stream that it takes the place of, and that one behind it. Nothing waits for the device.
    """
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)


def _captured(launch: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record what is launched on the current stream, and where its output will lie.

    `torch.cuda.graph` would wait for the whole device first and give memory back, which waits for it, too: for a
    tensor under way as long as its peer takes to send it.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # links may be opening in other threads
    try:
        output = launch()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the capture has failed
            graph.capture_end()
        raise
    graph.capture_end()
    return graph, output


def _check(recording: _Recording, expected: Tensor, written: Sequence[Tensor]) -> None:
    """Raise RuntimeError where a replay does not write what the launched pass has written."""
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
