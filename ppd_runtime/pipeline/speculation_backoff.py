"""When sub-processes, or a boundary's head, are left alone: never right, their work would only be in the way."""

from dataclasses import dataclass


@dataclass
class SpeculationBackoff:
    """An account of right and wrong candidates: the main process' goes on from request to request; of stages each
    boundary has one for each request.

    With the defaults a match rate of 0.3 leads to a rest in one run of five thousand.
    """

    trial: int = 24
    """Wrong candidates in a row before the first rest."""
    later_trial: int = 4
    """And after it, when what follows is the same kind of text as a rule; at least 2: the first miss after a hit has
    to be told, because its entries are fetched then."""
    shortest: int = 24
    """Tokens of the first rest; each in a row is twice as long as the one before."""
    longest: int = 256

    def __post_init__(self) -> None:
        self._limit, self._length = self.trial, self.shortest
        self._missed = self._left = 0

    @property
    def now(self) -> bool:
        """Whether no sub-process is asked for the next token."""
        return self._left > 0

    def begin(self) -> None:
        """A new request may be another kind of text: the sub-processes are tried at once."""
        self._missed = self._left = 0

    def note(self, hit: bool) -> None:
        """One more token: whether a sub-process that was asked about it was right, be it too late."""
        if self._left:
            self._left -= 1
        elif hit:
            self._missed, self._limit, self._length = 0, self.trial, self.shortest
        else:
            self._missed += 1
            if self._missed == self._limit:
                self._left, self._length = self._length, min(2 * self._length, self.longest)
                self._missed, self._limit = 0, self.later_trial
