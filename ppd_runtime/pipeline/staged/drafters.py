"""Boundary 0: drafters name what may follow a node and need none of its layers.

Texts are looked up in suffix automata, not in tables of n-grams: these know no match beyond their longest n-gram, and
in quotations the length of a match is what tells a right guess from a wrong one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar

from ppd_runtime.pipeline.staged.earlier_texts import NOWHERE, EarlierTexts, InGenerations
from ppd_runtime.pipeline.staged.suffix_automaton import LONGEST, Cursor, SuffixAutomaton
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.constraint import Constraint

_LENGTHS = 2, 3, 4, 5, 6, 7, 8, 12, 16
"""The least tokens of a match in each bin; a shorter match names nothing."""


class Source(IntEnum):
    """The kinds of drafters."""

    OWN_TEXT = 0
    EARLIER_TEXTS = 1
    GRAMMAR = 2


_SAID = {
    Source.OWN_TEXT: (0.38, 0.5, 0.55, 0.59, 0.64, 0.67, 0.74, 0.85, 0.95),
    Source.EARLIER_TEXTS: (0.14, 0.23, 0.29, 0.37, 0.43, 0.57, 0.63, 0.65, 0.68),  # nearly any two tokens match
}
"""The share of right guesses by length of match, before experience. No two numbers are equal, so a `GuessRecord` keeps
the experience of each source and length apart."""
CERTAIN = 1.0
"""What a grammar says of the only token that it allows."""


class Draft(NamedTuple):
    """A token that may come next."""

    token: int
    said: float
    """How likely it is, before experience."""
    source: Source
    length: int
    """Tokens of the match that it follows."""


def length_bin(length: int) -> int:
    """The bin of a match of so many tokens; negative if it is too short to name anything."""
    return bisect_right(_LENGTHS, length) - 1


def said(source: Source, length: int) -> float:
    """The chance, before experience, that a source is right behind a match of `length` tokens, at least 2."""
    return _SAID[source][length_bin(length)]


C = TypeVar("C")
"""A drafter's cursor: what it has read up to one node. A node's children have cursors from the node's."""


class Drafter(Protocol[C]):
    """Names what may follow the nodes of one request."""

    @property
    def newest(self) -> C:
        """The cursor behind the last certain token."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A request begins, or begins anew."""
        ...

    def follow(self, token: int) -> None:
        """One more token is certain."""
        ...

    def advance(self, cursor: C, token: int) -> C:
        """The cursor of a node from that of its parent."""
        ...

    def guesses(self, cursor: C) -> Sequence[Draft]:
        """What may follow a node, the likeliest first."""
        ...


class OwnText:
    """Names what followed the longest match in the request's own text, where this last stood.

    A cursor knows matches in the text as it was when the cursor was made. One that was made some tokens ago misses what
    was added since; advancing from `newest` over the guessed tokens does not.
    """

    def __init__(self) -> None:
        self.begin(())

    @property
    def newest(self) -> Cursor:
        """Implements `Drafter.newest`."""
        return self._text.newest

    def begin(self, prompt: Sequence[int]) -> None:
        """Implements `Drafter.begin`; takes some microseconds a token."""
        self._text = SuffixAutomaton()
        for token in prompt:
            self._text.add(token)

    def follow(self, token: int) -> None:
        """Implements `Drafter.follow`."""
        self._text.add(token)

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """Implements `Drafter.advance`."""
        return self._text.advance(cursor, token)

    def guesses(self, cursor: Cursor) -> Sequence[Draft]:
        """Implements `Drafter.guesses`."""
        return _drafts(Source.OWN_TEXT, self._text.guess(cursor))


class FromEarlierTexts:
    """Names what followed the longest match in earlier requests' texts."""

    def __init__(self, texts: EarlierTexts) -> None:
        self._texts = texts
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """Implements `Drafter.begin`."""
        self.newest = NOWHERE
        for token in prompt[-LONGEST:]:
            self.follow(token)

    def follow(self, token: int) -> None:
        """Implements `Drafter.follow`."""
        self.newest = self.advance(self.newest, token)

    def advance(self, cursor: InGenerations, token: int) -> InGenerations:
        """Implements `Drafter.advance`."""
        return self._texts.advance(cursor, token)

    def guesses(self, cursor: InGenerations) -> Sequence[Draft]:
        """Implements `Drafter.guesses`."""
        return _drafts(Source.EARLIER_TEXTS, self._texts.guess(cursor))


class FromGrammar:
    """Names the only token that a request's grammar allows, if there is one, and says which others it allows.

    It is no `Drafter`: what it says counts before all that drafters say.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def guess(self, text: Sequence[int]) -> Draft | None:
        """The token that has to follow a text, the prompt's tokens included."""
        try:
            token = self._constraint.forced(self._constraint.place(text))
        except RequestError:  # a guess fails nobody
            return None
        return None if token is None else Draft(token, CERTAIN, Source.GRAMMAR, 0)

    def allows(self, text: Sequence[int], token: int) -> bool:
        """Whether a token may follow a text."""
        return self._constraint.allows(self._constraint.place(text), token)


def _drafts(source: Source, guess: tuple[int, int] | None) -> Sequence[Draft]:
    if guess is None or length_bin(guess[1]) < 0:
        return ()
    token, length = guess
    return (Draft(token, said(source, length), source, length),)
