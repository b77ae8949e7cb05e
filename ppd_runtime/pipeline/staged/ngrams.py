"""Boundary 0: candidates that need no layer, from the text's own repetitions."""

from collections.abc import Sequence

from ppd_runtime.pipeline.staged.chances import Guess

_SHORTEST, LONGEST = 2, 7
"""Length of a match in tokens."""
_SAID = {2: 0.3, 3: 0.45, 4: 0.55, 5: 0.7, 6: 0.8, 7: 0.9}
"""The chance that the token after a match of this length is right; it chooses the bin of `GuessRecord`, which then
counts."""


class Repetitions:
    """The last place of each n-gram in a growing text, except at the text's end."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # the place after an n-gram
        self._history: Sequence[int] = ()
        self._known = 0

    def follow(self, history: Sequence[int]) -> None:
        """Index the text so far; a list other than the last one replaces its text."""
        if history is not self._history:
            self._behind, self._history, self._known = {}, history, 0
        for place in range(max(self._known, _SHORTEST), len(history)):
            for size in range(_SHORTEST, min(LONGEST, place) + 1):
                self._behind[tuple(history[place - size : place])] = place
        self._known = len(history)

    def guess(self, text: Sequence[int]) -> Guess | None:
        """The token that followed the last occurrence of the text's longest ending that occurs in the history; or None.

        `text` is the history, perhaps with candidates after it; only its last tokens are needed.
        """
        for size in range(min(LONGEST, len(text)), _SHORTEST - 1, -1):
            if (place := self._behind.get(tuple(text[-size:]))) is not None:
                return self._history[place], _SAID[size]
        return None
