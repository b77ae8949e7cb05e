"""What a runtime has decoded before, to be looked up by later requests."""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from ppd_runtime.pipeline.staged.suffix_automaton import EMPTY, Cursor, SuffixAutomaton

_AT_ONCE = 256  # tokens that are added while readers wait
_MEGABYTE = 2**20


class InGenerations(NamedTuple):
    """A cursor of `EarlierTexts`."""

    generation: int
    young: Cursor
    old: Cursor


NOWHERE = InGenerations(0, EMPTY, EMPTY)


class EarlierTexts:
    """Remembers texts in about `megabytes`; a text stays while it is used: to add it again renews it.

    There are two automata. Texts go into the young one; when that has half the memory, it becomes the old one, and the
    old one before it is forgotten. Threads may share an instance.
    """

    def __init__(self, megabytes: float) -> None:
        self._most_bytes = megabytes * _MEGABYTE / 2
        self._generation, self._young, self._old = 0, SuffixAutomaton(), SuffixAutomaton()
        self._writing, self._lock = Lock(), Lock()

    def add(self, text: Sequence[int]) -> None:
        """Remember a request's prompt and answer; takes some microseconds a token.

        Where memory runs out, all texts are forgotten: one that was added in part could not be read.
        """
        with self._writing:
            try:
                self._add(text)
            except MemoryError:
                with self._lock:
                    self._generation += 2
                    self._old, self._young = SuffixAutomaton(), SuffixAutomaton()

    def _add(self, text: Sequence[int]) -> None:
        self._young.begin_text()
        for start in range(0, len(text), _AT_ONCE):
            with self._lock:
                if self._young.num_bytes >= self._most_bytes:
                    self._generation += 1
                    self._old, self._young = self._young, SuffixAutomaton()
                for token in text[start : start + _AT_ONCE]:
                    self._young.add(token)

    def advance(self, cursor: InGenerations, token: int) -> InGenerations:
        """The longest matches with `token` behind those of a cursor; forgotten texts have none."""
        with self._lock:
            young, old = self._current(cursor)
            young, old = self._young.advance(young, token), self._old.advance(old, token)
            return InGenerations(self._generation, young, old)

    def guess(self, cursor: InGenerations) -> tuple[int, int] | None:
        """What last followed the longest match, and the length of that; None if there is none."""
        with self._lock:
            young, old = self._current(cursor)
            found = [guess for guess in (self._young.guess(young), self._old.guess(old)) if guess is not None]
        return max(found, key=lambda guess: guess[1], default=None)  # of equals the young one's

    def _current(self, cursor: InGenerations) -> tuple[Cursor, Cursor]:
        behind = self._generation - cursor.generation
        return (cursor.young, cursor.old) if behind == 0 else (EMPTY, cursor.young if behind == 1 else EMPTY)
