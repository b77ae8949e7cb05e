"""Whole chunks of prompts that stages keep: entries are equal in all prompts that begin alike."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.chunks import is_whole


class KeptChunk:
    """A whole chunk's states and entries from a stage; the entries lie in a request's cache at first.

    Args:
        cache: it holds the chunk's entries.
        positions: of its tokens.
        hidden: after the stage's layers, `[1, tokens, hidden_size]`.
    """

    def __init__(self, cache: StageCache, positions: range, hidden: Tensor) -> None:
        self.cache: StageCache | None = cache
        """The cache that holds the entries; None once they are copied."""
        self.num_tokens, self.hidden = len(positions), hidden
        self._positions = positions
        self._entries: tuple[Tensor, ...] = ()
        self.states = cache.states_after(positions.stop)
        """What the chunk's last token left beside entries, if layers keep states."""

    @property
    def entries(self) -> tuple[Tensor, ...]:
        """A copy made by `StageCache.copy_rows`."""
        self.leave_cache()
        return self._entries

    def leave_cache(self) -> None:
        """Copy the entries, if they are not copied yet."""
        if self.cache is not None:
            self._entries = self.cache.copy_rows(self._positions.start, self._positions.stop)
            self.cache = None


class KeptPrefixes:
    """Chunks of the prompts that a stage ran last, up to `most_tokens` tokens; the least recently used go first.

    A chunk is known by all tokens up to its end. Prompts run in chunks with the same borders everywhere, so its entries
    have the bits that the stage would compute again.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self._chunks: OrderedDict[bytes, KeptChunk] = OrderedDict()

    def key(self, prompt: Sequence[int], chunk: range) -> bytes | None:
        """A chunk's key; None for a chunk that is not kept."""
        if len(chunk) > self._most_tokens or not is_whole(chunk) or chunk.stop > len(prompt):
            return None
        return hashlib.sha256(array("q", prompt[: chunk.stop]).tobytes()).digest()

    def find(self, key: bytes | None) -> KeptChunk | None:
        """The chunk, if it is kept."""
        if key is None or key not in self._chunks:
            return None
        self._chunks.move_to_end(key)
        return self._chunks[key]

    def copy_from(self, cache: StageCache) -> None:
        """Copy chunks out of a cache that is about to hold another text; no request waits for it by then."""
        for chunk in self._chunks.values():
            if chunk.cache is cache:
                chunk.leave_cache()

    def keep(self, key: bytes, chunk: KeptChunk) -> None:
        """Keep it for later prompts."""
        if key in self._chunks:
            return
        self._chunks[key] = chunk
        self._tokens += chunk.num_tokens
        while self._tokens > self._most_tokens:
            self._tokens -= self._chunks.popitem(last=False)[1].num_tokens
