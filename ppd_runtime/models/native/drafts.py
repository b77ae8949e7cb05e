"""Chains of greedy drafts, each made and verified in one call; `drafts.cpp` says how it works."""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppd_runtime.models.native.layers import Layer, LayerProgram, function
from ppd_runtime.models.stage.caches import ATTENDED_ROWS, PreallocatedLayer

TIMES = 5
"""Times of a chain's token."""


class DraftRule(NamedTuple):
    """When a chain of drafts ends."""

    most: int
    """Most drafts."""
    least: float
    """It ends after the first draft whose chance is not at least this; -inf: chances do not matter."""
    together: bool
    """Whether a draft's chance is the product of those up to it."""


class PassVariants(NamedTuple):
    """Passes of given layers."""

    one: LayerProgram
    """For one token."""
    several: LayerProgram


class Verification(NamedTuple):
    """The layers that verify drafts: all, or those after the drafts' layers."""

    one: LayerProgram
    """For one token."""
    several: LayerProgram
    head: Layer
    most: int
    """Tokens that there is code for; longer chains are not verified."""


class DraftedChain(NamedTuple):
    """A chain of greedy drafts. The next chain overwrites what is not its own."""

    tokens: list[int]
    states: Tensor
    """`[1, ran, hidden_size]` after the layers; not its own."""
    ran: int
    """Tokens that ran through them."""
    times: Sequence[float]
    """Five per token that ran, in seconds of `time.perf_counter`: before it, after the layers, the part, the head and
    the choice. If nothing was drafted after the last token, only its first two are times. Not its own."""
    spent: Sequence[float]
    """Total seconds of layers, part, heads and the drafts' choice; not its own."""
    choices: list[int] | None
    """The whole model's choice after the first token and after each draft, or NO_TOKEN; None if not verified."""
    verified: Sequence[float]
    """Like `times`: before and after the verifying layers, after the head, after choosing; not its own."""


_P, _N, _B, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_bool, ctypes.c_double


class _LayerProgram(ctypes.Structure):
    """`Route` in `passes.h`: a `LayerProgram` as it lies in memory."""

    _fields_ = (("layers", _P), ("caches", _P), ("count", _N))


class _Chain(ctypes.Structure):
    """`Chain` in `drafts.cpp`, which explains fields."""

    _fields_ = (
        *((name, _LayerProgram) for name in ("layers", "part", "part_chain", "verify", "verify_chain")),
        *((name, _P) for name in ("list", "part_list")),
        *((name, _P) for name in ("head", "verifying_head", "embedding")),
        ("packed_bytes", _N),
        *((name, _N) for name in ("width", "vocab", "attended_rows", "extent", "most_verified")),
        *(("continues", _B), ("together", _B), ("least", _F), ("probe", _P), ("bias", _F)),
        *((name, _N) for name in ("most", "token", "position")),
        *(("unread", _P), ("num_unread", _N), ("part_length", _N)),
        *((name, _P) for name in ("found", "choices", "states", "times", "spent", "verified")),
        *(("num_drafts", _N), ("num_verified", _N)),
    )


class ChainDrafting:
    """Drafts a chain: layers, perhaps a part behind them, a head, the highest logit, repeated; then verifies it.

    Args:
        route: the layers, for one token.
        head: a norm and a head; it gives `vocab_size` logits for each token.
        embedding: in float32, contiguous, or packed.
        embedding_shape: `[vocab_size, hidden_size]`.
        part: what drafts go through between layers and head, such as an adapter.
        verification: what verifies drafts; None: nothing does.
        continues: whether verification continues after the layers, which the last draft then runs through too; else it
            runs all of the model's layers, and overwrites the drafts' entries.
    """

    def __init__(
        self,
        route: LayerProgram,
        head: Layer,
        vocab_size: int,
        embedding: Tensor,
        embedding_shape: Sequence[int],
        part: PassVariants | None,
        verification: Verification | None,
        continues: bool,
    ) -> None:
        self._route, self._verification, self._continues = route, verification, continues
        self._kept, self._embedded = (head, embedding), embedding_shape[0]
        self._chain = chain = _Chain()
        self._at_chain = ctypes.addressof(chain)
        chain.head, chain.embedding = head.handle, embedding.data_ptr()
        chain.packed_bytes = embedding.numel() if embedding.dtype == torch.uint8 else 0
        chain.vocab, chain.width, chain.attended_rows = vocab_size, embedding_shape[1], ATTENDED_ROWS
        chain.continues = continues
        self._of_part = [(chain.part, part.one), (chain.part_chain, part.several)] if part else []
        self._of_model = [(chain.layers, route)]
        if verification:
            chain.verifying_head, chain.most_verified = verification.head.handle, verification.most
            self._of_model += [(chain.verify, verification.one), (chain.verify_chain, verification.several)]
        self._draft = function("ppd_draft")
        self._take_room(0)

    def foretell(self, direction: Tensor, bias: float) -> None:
        """From now on a draft's chance is not its softmax: its log odds are `bias` + the product of `direction`,
        `[hidden_size]` in float32, with the state after the layers.
        """
        self._direction = direction.contiguous()
        self._chain.probe, self._chain.bias = self._direction.data_ptr(), bias

    def _take_room(self, most: int) -> None:
        """Allocate memory for chains of `most` drafts, which reuse it."""
        chain = self._chain
        states = torch.empty(1, most + 1, chain.width, dtype=torch.float32, device="cpu")
        views = [states[:, :ran] for ran in range(most + 2)]  # to make one takes twenty microseconds
        tokens = [array("q", bytes(8 * size)) for size in (most, most + 1)]
        times = [array("d", bytes(8 * size)) for size in (TIMES * (most + 1), TIMES - 1, TIMES - 1)]
        (self._found, self._choices), (self._times, self._spent, self._verified) = tokens, times
        chain.found, chain.choices = (numbers.buffer_info()[0] for numbers in tokens)
        chain.times, chain.spent, chain.verified = (numbers.buffer_info()[0] for numbers in times)
        chain.states, self._states = states.data_ptr(), views
        self._most = most

    def run(
        self,
        caches: Sequence[PreallocatedLayer],
        token: int,
        rule: DraftRule,
        of_part: Sequence[PreallocatedLayer] = (),
        unread: Tensor | None = None,
    ) -> DraftedChain:
        """Draft after `token`, which follows the tokens in `caches`, and verify; the caches count what ran.

        `of_part` are the part's caches; `unread` are states, `[1, tokens, hidden_size]`, that it reads before this
        chain's.
        """
        if not 0 <= token < self._embedded:
            raise IndexError(f"token {token}: the embedding has {self._embedded}")
        for ways, its_caches in ((self._of_model, caches), (self._of_part, of_part)):
            for place, route in ways:
                route.over(its_caches)
                place.layers, place.caches, place.count = route.memory
        chain, oldest, most = self._chain, self._route.attending[0], rule.most
        position = oldest.length
        oldest.check_room(position + most + 1)
        chain.list, chain.extent = oldest.order.address(position + most + 1), oldest.order.extent
        num_unread = 0
        if of_part:
            unread = None if unread is None else unread.contiguous()
            chain.unread = None if unread is None else unread.data_ptr()
            chain.num_unread = num_unread = 0 if unread is None else unread.shape[1]
            chain.part_length = of_part[0].length
            of_part[0].check_room(of_part[0].length + num_unread + most)
            chain.part_list = of_part[0].order.address(of_part[0].length + num_unread + most)
        if most > self._most:
            self._take_room(most)
        chain.most, chain.least, chain.together = rule
        chain.token, chain.position = token, position
        failed = self._draft(self._at_chain)
        if failed:
            raise RuntimeError(f"compiled code failed ({failed}) at position {position}, drafting {most} tokens")
        drafted, verified = chain.num_drafts, chain.num_verified
        for cache in of_part if drafted else ():
            cache.length += num_unread + drafted
        ran = drafted + self._continues
        self._count(position, ran, verified)
        tokens, choices = self._found[:drafted].tolist(), self._choices[:verified].tolist() if verified else None
        return DraftedChain(tokens, self._states[ran], ran, self._times, self._spent, choices, self._verified)

    def _count(self, position: int, ran: int, verified: int) -> None:
        """Tell the model's caches how many tokens they hold."""
        if self._continues or not verified:
            for cache in self._route.attending:
                cache.length = position + ran
        if self._verification and verified:
            for cache in self._verification.one.attending:
                cache.length = position + verified
