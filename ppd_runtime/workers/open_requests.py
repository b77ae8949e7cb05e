"""The requests that may still run, as far as their `Begin` messages tell."""

from ppd_runtime.pipeline.messages import Begin


class OpenRequests:
    """The requests that may still run.

    The client numbers requests in the order in which they begin. Each `Begin` names the earlier requests that are not
    over. A late `Begin` stays true, because a request that is over does not begin again.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._open: list[int] = []  # up to the newest

    def learn(self, begin: Begin) -> None:
        """Learn from a `Begin` which requests are over."""
        newest, earlier = begin.request, set(begin.under_way)
        if newest > self._newest:
            self._open = [*(r for r in sorted(earlier) if r in self and r < newest), newest]
            self._newest = newest
        else:
            self._open = [r for r in self._open if r >= newest or r in earlier]

    def __contains__(self, request: int) -> bool:
        """Whether a request may still run; one that is newer than all known ones may."""
        return request > self._newest or request in self._open
