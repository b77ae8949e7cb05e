"""CUDA graphs: the launches of a pass, recorded once and replayed as one.

On a GPU launching a small layer takes longer than running it. A recording holds for the very memory that it was made
with, so there is one for each layer range, tree of tokens, number of attended rows and set of caches.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
_MOST_RECORDINGS = 64
Launch = Callable[[Tensor, Tensor], Tensor]
"""Runs a pass: hidden states `[1, tokens, hidden_size]` and their position `[1]`, both on the GPU, in; states out."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    position: Tensor
    output: Tensor


class Recordings:
    """Recorded passes of one stage. Where a pass cannot be recorded, it and all later ones are launched as they are."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._works = True

    def run(self, key: Hashable, hidden: Tensor, position: int, launch: Launch) -> Tensor:
        """The pass over `hidden`; `key` tells all that makes a recording another one. The result is the caller's."""
        where = torch.full((1,), position, dtype=torch.int64, device=hidden.device)
        if not self._works:
            return launch(hidden, where)
        recording = self._recordings.get(key)
        if recording is None:
            try:
                recording = self._record(key, hidden, where, launch)
            except RuntimeError as error:
                self._works = False
                logger.warning("CUDA graphs are left out: %s", " ".join(str(error).split())[:200])
                return launch(hidden, where)
        recording.hidden.copy_(hidden)
        recording.position.copy_(where)
        recording.graph.replay()
        return recording.output.clone()

    def _record(self, key: Hashable, hidden: Tensor, position: Tensor, launch: Launch) -> _Recording:
        """Launch once to warm up, which writes what the replay will write again, then record."""
        if len(self._recordings) >= _MOST_RECORDINGS:
            self._recordings.clear()
        hidden, position = hidden.clone(), position.clone()
        side, current = torch.cuda.Stream(hidden.device), torch.cuda.current_stream(hidden.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            launch(hidden, position)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # links may be opening in other threads
            output = launch(hidden, position)
        self._recordings[key] = _Recording(graph, hidden, position, output)
        return self._recordings[key]
