"""What a layer range holds of one sequence: cut back, shipped, and continued from what others have computed."""

import time
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.prefixes import KeptChunk
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind


class HeldSequence:
    """The entries of one sequence in a range of layers."""

    has_states: ClassVar[bool] = False
    """Whether layers keep a recurrent state; see `StateRange`."""
    cache: StageCache
    device: torch.device
    num_layers: int
    first_layer: int
    recorder: Recorder

    def keep_states(self, tokens: int | None) -> None:
        """The sequence that has begun may be cut back by so many tokens; None: to where it was cut back last.

        Without states it may be cut back anywhere.
        """

    def held_from(self, first: int, last: int) -> int:
        """The end of the run of tokens from `first` on whose entries in layers 0 to `last` can be exported."""
        return self.length(0)

    def length(self, layer: int) -> int:
        """Tokens whose entries `layer` holds."""
        return self.cache.layers[layer].length

    def truncate(self, length: int) -> None:
        """Keep the entries of the first `length` tokens, drop the newer ones."""
        self.cache.truncate(length)

    def keep_candidate(self, position: int, index: int) -> None:
        """Keep the entries of one candidate at `position`, and drop the others'."""
        self.keep_path(position, [index])

    @torch.inference_mode()
    def keep_path(self, position: int, nodes: Sequence[int]) -> None:
        """Keep the entries of a path from a root of the tree that ran at `position`, and drop the others."""
        began = time.perf_counter()
        self.cache.keep_path(position, nodes)
        self.recorder.note(Kind.ENTRIES, began, time.perf_counter(), position, -1, 0, self.num_layers)

    @torch.inference_mode()
    def export_entries(self, first: int, end: int, last: int) -> Tensor:
        """A copy of the entries of tokens `first` to `end` in layers 0 to `last`: `[tokens, last, 2, heads, dim]`."""
        began = time.perf_counter()
        entries = self.cache.export_entries(first, end, last)
        self.recorder.note(Kind.ENTRIES, began, time.perf_counter(), first, -1, 0, last)
        return entries

    @torch.inference_mode()
    def import_entries(self, entries: Sequence[Tensor]) -> None:
        """Append consecutive tokens' entries to the first layers, each from `export_entries`."""
        began, position = time.perf_counter(), self.length(0)
        self.cache.import_entries([entry.to(self.device) for entry in entries])
        self.recorder.note(Kind.ENTRIES, began, time.perf_counter(), position, -1, 0, len(entries[0]))

    def append_chunk(self, chunk: KeptChunk) -> None:
        """Append a kept chunk to the stage's layers."""
        began, position = time.perf_counter(), self.length(self.first_layer)
        self.cache.append_chunk(chunk.entries, chunk.states, chunk.num_tokens)
        self.recorder.note(Kind.ENTRIES, began, time.perf_counter(), position, -1, self.first_layer, self.num_layers)
