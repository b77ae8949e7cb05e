"""Where the time of a request went, in sums."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LatencyBreakdown:
    """Where the time on the tokens' path went, in seconds; the parts sum to the whole.

    The path is the main process', from arrival to the last token.
    """

    layers_s: float
    """Passes through layers."""
    heads_s: float
    """The final norm and head, and choosing the token."""
    hops_s: float
    """Sending, receiving, and putting delivered entries in place; also a wait while its message is on its way."""
    waiting_s: float
    """Waiting for a sub-process that was not done yet."""
    python_s: float
    """Everything between these."""

    @property
    def total_s(self) -> float:
        """The whole."""
        return self.layers_s + self.heads_s + self.hops_s + self.waiting_s + self.python_s

    def plus(self, later: "LatencyBreakdown") -> "LatencyBreakdown":
        """The sum of two stretches of time."""
        return LatencyBreakdown(*(getattr(self, field.name) + getattr(later, field.name) for field in fields(self)))

    def per_token_since(self, first: "LatencyBreakdown", num_tokens: int) -> "LatencyBreakdown":
        """What has come since `first`, as a share of `num_tokens` tokens."""
        names = [field.name for field in fields(self)]
        return LatencyBreakdown(**{name: (getattr(self, name) - getattr(first, name)) / num_tokens for name in names})
