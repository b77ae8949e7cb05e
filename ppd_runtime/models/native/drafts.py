"""Chains of greedy drafts, each in one call; `drafts.cpp` says how it works."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppd_runtime.models.kv_cache import ATTENDED_ROWS, PreallocatedLayer
from ppd_runtime.models.native.layers import Layer, Route, function
from ppd_runtime.models.trees import TokenTree, chain_of

_CPU = torch.device("cpu")
TIMES = 5
"""Of each token of a chain."""


class DraftRule(NamedTuple):
    """When a chain of drafts ends."""

    most: int
    """Drafts at the most."""
    least: float
    """It ends behind the first draft whose chance is below this."""
    together: bool
    """Whether a draft's chance is the product of those up to it."""


class DraftedChain(NamedTuple):
    """A chain of greedy drafts."""

    tokens: list[int]
    states: Tensor
    """`[1, ran, hidden_size]` behind the layers; the next chain overwrites them, and the times."""
    ran: int
    """Tokens that ran through them."""
    times: Sequence[float]
    """Five of each token that ran, seconds of `time.perf_counter`: before it, behind the layers, behind the part, the
    head and the choice. Where nothing was drafted behind the last one, only its first two are times."""
    spent: Sequence[float]
    """Seconds of all of them together: of the layers, the part, the head and the choice."""


class ChainDrafting:
    """Layers, perhaps a part behind them, a head, and the highest logit, until a chain ends.

    Args:
        route: the layers, for one token.
        head: a norm and a head, for one token; it gives `vocab_size` logits.
        embedding: `[vocab_size, hidden_size]` in float32, contiguous.
        part: what drafts go through between layers and head, such as an adapter: for one token, and for several.
        runs_last: whether the last draft runs through the layers too.
    """

    def __init__(
        self,
        route: Route,
        head: Layer,
        vocab_size: int,
        embedding: Tensor,
        part: tuple[Route, Route] | None,
        runs_last: bool,
    ) -> None:
        self._route, self._head, self._embedding, self._runs_last = route, head, embedding, runs_last
        self._width = embedding.shape[1]
        self._sizes = vocab_size, embedding.data_ptr(), self._width, ATTENDED_ROWS
        self._part, self._draft = part, function("ppd_draft")
        self._take_room(0)

    def _take_room(self, most: int) -> None:
        """For what chains of so many drafts leave, one after the other."""
        self._most = most
        self._found, self._spent = array("q", bytes(8 * most)), array("d", bytes(8 * (TIMES - 1)))
        self._times = array("d", bytes(8 * TIMES * (most + 1)))
        states = torch.empty(1, most + 1, self._width, dtype=torch.float32, device="cpu")
        self._states = [states[:, :ran] for ran in range(most + 2)]  # to make such a view takes twenty microseconds
        found, *times = (numbers.buffer_info()[0] for numbers in (self._found, self._times, self._spent))
        self._room = found, states.data_ptr(), *times

    def run(
        self,
        caches: Sequence[PreallocatedLayer],
        token: int,
        rule: DraftRule,
        of_part: Sequence[PreallocatedLayer] = (),
        unread: Tensor | None = None,
    ) -> DraftedChain:
        """Draft behind `token`, whose place is behind the tokens that `caches` hold; they count those that ran.

        The part has the caches `of_part`, and `unread` are states, `[1, tokens, hidden_size]`, that it reads before
        those of this chain.
        """
        if not 0 <= token < len(self._embedding):
            raise IndexError(f"token {token}: the embedding has {len(self._embedding)}")
        unread = None if unread is None else unread.contiguous()
        num_unread = 0 if unread is None else unread.shape[1]
        tree = chain_of(num_unread + 1, _CPU)
        route, most = self._route, rule.most
        route.over(caches)
        position = route.attending[0].length
        route.attending[0].check_room(position + most + self._runs_last)
        if most > self._most:
            self._take_room(most)
        drafted: int = self._draft(
            *route.memory,
            *self._about_part(of_part, most, unread, tree),
            self._head.handle,
            *self._sizes,
            token,
            position,
            *rule,
            self._runs_last,
            *self._room,
        )
        if drafted < 0:
            raise RuntimeError(f"compiled code failed ({drafted}) at position {position}, drafting {most} tokens")
        ran = drafted + self._runs_last
        for cache in route.attending:
            cache.length += ran
        for cache in of_part if drafted else ():
            cache.length += num_unread + drafted
        return DraftedChain(self._found[:drafted].tolist(), self._states[ran], ran, self._times, self._spent)

    def _about_part(
        self, caches: Sequence[PreallocatedLayer], most: int, unread: Tensor | None, tree: TokenTree
    ) -> Sequence[int | None]:
        if self._part is None:
            return (None, None, 0) * 2 + (None, 0, None, None, 0)
        for route in self._part:
            route.over(caches)
        one, several = self._part
        place, num_unread = (None, 0) if unread is None else (unread.data_ptr(), unread.shape[1])
        caches[0].check_room(caches[0].length + num_unread + most)
        return *one.memory, *several.memory, place, num_unread, *tree.memory, caches[0].length
