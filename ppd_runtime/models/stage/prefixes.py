"""What stages keep of prompts: whole chunks, whose entries are the same in every prompt that begins alike."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.models.stage.chunks import is_whole


@dataclass(frozen=True)
class KeptChunk:
    """A whole chunk as a stage has computed it."""

    entries: tuple[Tensor, ...]
    """As `StageCache.copy_rows` gives them."""
    hidden: Tensor
    """Behind the stage's layers, `[1, tokens, hidden_size]`."""


class KeptPrefixes:
    """Chunks of the prompts that a stage has run last, up to `most_tokens` tokens; those go first that were used least
    recently.

    A chunk is known by all tokens up to its end. Prompts run in chunks with the same borders everywhere, so its entries
    have the bits that the stage would compute again.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self._chunks: OrderedDict[bytes, KeptChunk] = OrderedDict()

    def key(self, prompt: Sequence[int], chunk: range) -> bytes | None:
        """What a chunk is known by; None for one that is not kept."""
        if len(chunk) > self._most_tokens or not is_whole(chunk) or chunk.stop > len(prompt):
            return None
        return hashlib.sha256(array("q", prompt[: chunk.stop]).tobytes()).digest()

    def find(self, key: bytes | None) -> KeptChunk | None:
        """The chunk, if it is kept."""
        if key is None or key not in self._chunks:
            return None
        self._chunks.move_to_end(key)
        return self._chunks[key]

    def keep(self, key: bytes, chunk: KeptChunk) -> None:
        """Have it for later prompts."""
        if key in self._chunks:
            return
        self._chunks[key] = chunk
        self._tokens += chunk.hidden.shape[1]
        while self._tokens > self._most_tokens:
            self._tokens -= self._chunks.popitem(last=False)[1].hidden.shape[1]
