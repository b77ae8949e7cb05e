"""Checks that all workers of a runtime compute the same bits: others may not serve."""

from ppd_runtime.settings.layouts import DECIDER, Layout
from ppd_runtime.workers.bits import Bits


class BitHandshake:
    """Compares each started worker's bits with those of the first deciding process.

    Until that process is there, all are compared with each other.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[int, Bits] = {}

    def check(self, rank: int, bits: Bits) -> None:
        """Add a worker that is ready; RuntimeError, naming both machines, if another's bits differ."""
        for other in [DECIDER] if DECIDER in self._known else list(self._known):
            if names := bits.different(self._known[other]):
                whom = "its first start" if other == rank else self._layout.named(other)
                raise RuntimeError(
                    f"it computes other bits than {whom} ({', '.join(names)}), so tokens might differ: it runs on "
                    f"{bits.machine}; {whom} on {self._known[other].machine}; give all workers one kind of machine and "
                    "the same versions"
                )
        self._known.setdefault(rank, bits)
