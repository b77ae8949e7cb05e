"""A grammar's masks: which tokens may follow a text, and a guess behind it.

llguidance's matcher reads one text at a time. Here it walks on a tree of texts: from one place to another it takes back
the tokens that the two do not share, and reads the others.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from ppd_runtime.request_error import RequestError, no_text
from ppd_runtime.sampling.grammar import one_line_fault

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KEPT = 64  # newest tokens behind which masks and other branches are kept
_NOT_ASKED = -2
_NOTHING = -1
Found = TypeVar("Found")


class Place:
    """A text of the request's, by its newest token and the place before it."""

    __slots__ = ("children", "depth", "fault", "forced", "is_dead", "mask", "parent", "token")

    def __init__(self, token: int = _NOTHING, parent: "Place | None" = None, is_dead: bool = False) -> None:
        self.token, self.parent = token, parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[int, Place] = {}
        """By token."""
        self.is_dead = is_dead
        """Whether the text is known to break the grammar, or has ended."""
        self.mask: np.ndarray | None = None
        """`[vocab_size / 8]` bytes, once asked for: a bit for each token, the lowest first."""
        self.forced = _NOT_ASKED
        """The only token that may follow, if there is one."""
        self.fault = ""
        """Why there is no mask."""


class Constraint:
    """A grammar for one request's new tokens; used by one thread at a time.

    A lexer keeps all states that its readers have led to, other requests and wrong guesses too, and fails for good at
    a bound on them. So a fresh matcher takes the place of one that has failed, and reads one text alone. Whether that
    fails depends on the text only.

    Args:
        matcher: one that has read nothing; others may share its lexer.
        fresh: makes one with a lexer of its own.
        own_end: its tokenizer's end token, which is none of the model's.
        ends: tokens that end the text; allowed where the grammar is complete, and nowhere else.
        vocab_size: the model's.
        start: tokens before the first one that the grammar is about.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        fresh: "Callable[[], LLMatcher]",
        own_end: int,
        ends: Collection[int],
        vocab_size: int,
        start: int,
    ) -> None:
        self._fresh, self._start, self._vocab_size = fresh, start, vocab_size
        self._own_end, self._ends = own_end, frozenset(ends)
        self._mask_size = max(vocab_size, own_end + 1) // 8 + 1
        self.root = Place()
        """Where nothing was generated yet."""
        self._matcher, self._at = matcher, self.root
        self._line, self._tokens = [self.root], list[int]()  # the places and tokens of the text asked for last
        self._pruned = 0  # places of the line, from the first on, that keep nothing

    def __del__(self) -> None:
        _cut_off(self.root)

    def place(self, text: Sequence[int]) -> Place:
        """The place of a text, the prompt's tokens included."""
        tokens = [*text[self._start :]]
        while self._tokens != tokens[: len(self._tokens)]:
            self._tokens.pop()
            self._line.pop()
        for token in tokens[len(self._tokens) :]:
            self._line.append(self.after(self._line[-1], token))
        self._tokens = tokens
        self._prune()
        return self._line[-1]

    def after(self, place: Place, token: int) -> Place:
        """The place one token further."""
        if (found := place.children.get(token)) is None:
            found = place.children[token] = Place(token, place, place.is_dead or token in self._ends)
        return found

    def masked(self, scores: Tensor, text: Sequence[int]) -> Tensor:
        """The scores `[vocab_size]` of what may follow a text; infinitely low for what may not.

        Raises:
            RequestError: if nothing may follow, or the grammar takes too long.
        """
        allowed = self.allowed(self.place(text))
        return torch.where(torch.from_numpy(allowed).to(scores.device), scores, -math.inf)

    def allowed(self, place: Place) -> np.ndarray:
        """Whether each token may follow, `[vocab_size]` booleans; raises RequestError as `masked` does."""
        mask = self._mask(place)
        if not mask.any():
            raise no_text("no token of the model's vocabulary continues the text, give another one")
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(bool)

    def allows(self, place: Place, token: int) -> bool:
        """Whether a token may follow; False if it is not known."""
        try:
            mask = self._mask(place)
        except RequestError:
            return False
        return _bit(mask, token)

    def forced(self, place: Place) -> int | None:
        """The only token that may follow; None if there are several, none, or the end, and if it is not known."""
        if place.forced == _NOT_ASKED:
            place.forced = _NOTHING
            try:
                found = self._ask(place, lambda matcher: matcher.compute_ff_tokens())
            except RequestError:
                return None
            if found and self.allows(place, found[0]):
                place.forced = found[0]
        return None if place.forced == _NOTHING else place.forced

    def _mask(self, place: Place) -> np.ndarray:
        if place.mask is None and not place.fault:
            try:
                place.mask = self._computed(place)
            except RequestError as error:
                place.fault = str(error)
        if place.mask is None:
            raise RequestError(place.fault)
        return place.mask

    def _computed(self, place: Place) -> np.ndarray:
        found, size = self._ask(place, lambda _: self._bitmask()), self._mask_size
        if found is None:
            return np.zeros(size, np.uint8)
        mask = np.frombuffer(found, np.uint8)[:size].copy()
        is_complete = _bit(mask, self._own_end)
        _set_bit(mask, self._own_end, False)
        for end in self._ends:
            _set_bit(mask, end, is_complete)
        return mask

    def _bitmask(self) -> bytes:
        """The matcher's mask, from a copy of it.

        A matcher keeps its newest mask, and gives it again behind as many lexemes if the lexer is in the same state.
        Behind a rollback that may be another branch of the grammar.
        """
        self._matcher.compute_ff_tokens()  # what has to follow is found once, for later masks too
        asked = self._matcher.deep_copy()
        found = asked.compute_bitmask()
        if asked.is_error():
            self._matcher = asked
        return found

    def _ask(self, place: Place, question: "Callable[[LLMatcher], Found]") -> Found | None:
        """What a matcher that has read a place's text answers; None if no text of the grammar's begins so.

        Raises:
            RequestError: if a fresh one fails.
        """
        is_fresh = False
        while True:
            if self._matcher.is_error():
                self._matcher, self._at, is_fresh = self._fresh(), self.root, True
            found = question(self._matcher) if self._go(place) else None
            if not self._matcher.is_error():
                return found
            if is_fresh:
                fault = one_line_fault(self._matcher.get_error())
                raise no_text(fault.replace("NoExtensionBias", "nothing may follow"))

    def _go(self, place: Place) -> bool:
        """Bring the matcher to a place; False if no text of the grammar's begins so, or the matcher fails."""
        if place.is_dead:
            return False
        back, ahead = 0, list[Place]()
        here, there = self._at, place
        while here is not there:
            if here.depth >= there.depth:
                assert here.parent is not None, "all places have one root"
                here, back = here.parent, back + 1
            else:
                assert there.parent is not None, "all places have one root"
                ahead.append(there)
                there = there.parent
        if back:
            self._matcher.rollback(back)
        ahead.reverse()
        read = self._matcher.try_consume_tokens([one.token for one in ahead]) if ahead else 0
        if read < len(ahead):
            self._bitmask()  # a lexer that has failed takes no token, and says so only here
        if self._matcher.is_error():
            return False
        self._at = ahead[read - 1] if read else here
        for one in ahead[read:]:
            one.is_dead = True
        return read == len(ahead)

    def _prune(self) -> None:
        """Forget masks and branches that are far behind the text's end."""
        self._pruned = min(self._pruned, len(self._line) - 1)
        while len(self._line) - self._pruned > _KEPT:
            old, following = self._line[self._pruned : self._pruned + 2]
            del old.children[following.token]
            _cut_off(old)
            old.mask, old.children[following.token] = None, following
            self._pruned += 1


def _cut_off(place: Place) -> None:
    """Take away all behind a place: places that hold each other, and their masks, would wait for a late collection."""
    doomed = [place]
    while doomed:
        one = doomed.pop()
        doomed += one.children.values()
        one.children.clear()


def _bit(mask: np.ndarray, number: int) -> bool:
    return bool(mask[number >> 3] >> (number & 7) & 1)


def _set_bit(mask: np.ndarray, number: int, value: bool) -> None:
    bit = np.uint8(1 << (number & 7))
    mask[number >> 3] = mask[number >> 3] | bit if value else mask[number >> 3] & ~bit
