"""When to stop drafting: after so many tokens, at a doubtful token, or at a text that is doubtful as a whole."""

import math
from dataclasses import dataclass

from ppd_runtime.methods.choices import STOPPING_RULES
from ppd_runtime.models.native.drafts import DraftRule
from ppd_runtime.settings.checks import check_choice, check_share, check_whole


@dataclass(frozen=True)
class Adaptation:
    """How a threshold follows the acceptance rate (AdaSPEED, appendix, with Draft & Verify's values)."""

    target_rate: float = 0.9
    """α: the acceptance rate to keep to."""
    step: float = 0.01
    """ε: how far a draft moves the threshold."""
    rate_memory: float = 0.5
    """β₁: what the running acceptance rate keeps of itself at each draft."""
    threshold_memory: float = 0.9
    """β₂: what the threshold keeps of itself."""

    def __post_init__(self) -> None:
        for name in ("target_rate", "step", "rate_memory", "threshold_memory"):
            check_share(name, getattr(self, name))

    def adapted(self, threshold: float, rate: float, draft_rate: float) -> tuple[float, float]:
        """The next threshold and running rate after a draft with the acceptance rate `draft_rate`."""
        rate = self.rate_memory * rate + (1 - self.rate_memory) * draft_rate
        moved = threshold + self.step if rate <= self.target_rate else threshold - self.step
        threshold = self.threshold_memory * threshold + (1 - self.threshold_memory) * moved
        return min(max(threshold, 0.0), 1.0), rate


@dataclass(frozen=True)
class Stopping:
    """A stopping rule for drafts of at most `most` tokens.

    Raises:
        ValueError: for an unknown rule, and for numbers out of range.
    """

    rule: str = "constant"
    """One of `STOPPING_RULES`."""
    most: int = 6
    """Tokens that a draft has at the most."""
    threshold: float = 0.8
    """γ: drafting ends behind the first token whose confidence, or whose text's, is below it."""
    adaptation: Adaptation | None = None
    """How the threshold follows the acceptance rate; None: it stays."""

    def __post_init__(self) -> None:
        check_choice("stopping", self.rule, STOPPING_RULES)
        check_whole("num_speculations", self.most, 1)
        check_share("threshold", self.threshold)


class StopDrafting:
    """A stopping rule at work on one request."""

    def __init__(self, stopping: Stopping) -> None:
        self.stopping = stopping
        self.threshold = stopping.threshold
        self._rate = stopping.adaptation.target_rate if stopping.adaptation else 0.0
        self._drafted, self._confidence = 0, 1.0

    def begin_draft(self, most: int) -> None:
        """Begin a draft of at most `most` tokens, a limit that the text sets."""
        self._drafted, self._confidence = 0, 1.0
        self._most = min(most, self.stopping.most)

    def wants_more(self) -> bool:
        """Whether another token should be drafted."""
        if self._drafted >= self._most:
            return False
        return self.stopping.rule == "constant" or self._drafted == 0 or self._confidence >= self.threshold

    def drafted(self, confidence: float) -> None:
        """A token was drafted; `confidence` in [0, 1] is its probability, or the probe's."""
        self._drafted += 1
        self._confidence = self._confidence * confidence if self._is_of_the_text else confidence

    def rule(self, most: int) -> DraftRule:
        """This rule for a draft that is made in one call."""
        constant = self.stopping.rule == "constant"
        return DraftRule(min(most, self.stopping.most), -math.inf if constant else self.threshold, self._is_of_the_text)

    @property
    def _is_of_the_text(self) -> bool:
        return self.stopping.rule in ("product", "probe")

    def judged(self, drafted: int, accepted: int) -> None:
        """Note that `accepted` of `drafted` tokens stayed."""
        if self.stopping.adaptation and drafted:
            rate = accepted / drafted
            self.threshold, self._rate = self.stopping.adaptation.adapted(self.threshold, self._rate, rate)
