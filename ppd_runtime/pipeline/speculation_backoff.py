"""When speculation pauses: after 24 misses in a row for 24 tokens, doubling up to 256."""

from dataclasses import dataclass


@dataclass
class SpeculationBackoff:
    """Counts hits and misses, and says whether candidates are asked for.

    The main process keeps one over all its requests; with stages each boundary has one for each request. With the
    defaults a match rate of 0.3 leads to a pause in one run of five thousand.
    """

    trial: int = 24
    """Misses in a row before the first pause."""
    later_trial: int = 4
    """Misses in a row after a pause, behind which the text is mostly of the same kind. At least 2: the first miss after
    a hit has to be told, because its entries are fetched then."""
    shortest: int = 24
    """Tokens of the first pause; each further one without a hit between is twice as long."""
    longest: int = 256
    """Tokens of a pause, at the most."""

    def __post_init__(self) -> None:
        self._limit, self._length = self.trial, self.shortest
        self._missed = self._left = 0

    @property
    def now(self) -> bool:
        """Whether it pauses: nothing is asked for the next token."""
        return self._left > 0

    def begin(self) -> None:
        """A new request may be another kind of text: no pause goes on."""
        self._missed = self._left = 0

    def note(self, hit: bool) -> None:
        """One more token: whether a candidate was right, be it too late."""
        if self._left:
            self._left -= 1
        elif hit:
            self._missed, self._limit, self._length = 0, self.trial, self.shortest
        else:
            self._missed += 1
            if self._missed == self._limit:
                self._left, self._length = self._length, min(2 * self._length, self.longest)
                self._missed, self._limit = 0, self.later_trial
