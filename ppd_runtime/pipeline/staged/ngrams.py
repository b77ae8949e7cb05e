"""Boundary 0: candidates that need no layer, from the text's own repetitions."""

from collections.abc import Sequence

from ppd_runtime.pipeline.staged.chances import Guess

_SHORTEST, LONGEST = 2, 7
"""Tokens that have to be alike."""
_SAID = {2: 0.3, 3: 0.45, 4: 0.55, 5: 0.7, 6: 0.8, 7: 0.9}
"""The chance that the token after a match of so many tokens is right, until experience says more; the bins of
`GuessRecord`."""


class Repetitions:
    """Where the n-grams of a text, which grows, stood last before its end."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # the place behind an n-gram
        self._history: Sequence[int] = ()
        self._known = 0

    def follow(self, history: Sequence[int]) -> None:
        """The text so far; a text that was not the beginning of this one is forgotten."""
        if history is not self._history:
            self._behind, self._history, self._known = {}, history, 0
        for place in range(max(self._known, _SHORTEST), len(history)):
            for size in range(_SHORTEST, min(LONGEST, place) + 1):
                self._behind[tuple(history[place - size : place])] = place
        self._known = len(history)

    def guess(self, text: Sequence[int]) -> Guess | None:
        """What followed the longest end of a text where that stood before; None where it never did.

        `text` is the history, perhaps with candidates behind it; its end is enough.
        """
        for size in range(min(LONGEST, len(text)), _SHORTEST - 1, -1):
            if (place := self._behind.get(tuple(text[-size:]))) is not None:
                return self._history[place], _SAID[size]
        return None
