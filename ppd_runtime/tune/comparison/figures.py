"""What a comparison says of a method: plain numbers from paired runs; times in seconds.

The symbols are those of SWIFT's equation 6 and of Kangaroo's section 3: α the acceptance rate, M tokens for each full
pass, CR tokens for each verification, s draft steps for each verification, c the time of a draft step over that of an
ordinary step, v that of a verification.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ppd_runtime.cost_model.theory import drafting_ratio
from ppd_runtime.tune.quartiles import quartiles

WINDOWS = tuple(range(1, 7))
"""The w of CTAR(w), as in Kangaroo's Figure 3."""


@dataclass(frozen=True)
class Drafting:
    """Drafting and verifying after the first full pass, an entry for each verification."""

    lengths: tuple[int, ...]
    """New tokens."""
    drafted: tuple[int, ...]
    """Draft steps."""
    accepted: tuple[int, ...]
    """Drafted tokens that stayed."""
    draft_s: float
    verify_s: float
    reused_share: float = 0.0
    """The share of layers that drafting, not verification, runs over the newest certain token."""


@dataclass(frozen=True)
class TextRun:
    """One text by one method."""

    new_tokens: int
    latency_s: float
    first_s: float
    """Time until the first tokens."""
    first_tokens: int = 1
    """Tokens that came at once from the first full pass."""
    cpu_s: float = 0.0
    """This process' CPU time meanwhile, all threads together."""
    layers_s: float = 0.0
    """A step's time in layers."""
    drafting: Drafting | None = None
    predicted_ratio: float | None = None
    """Another theorem's time for a token after the first over ordinary decoding's; None: equation 6 gives it."""

    @property
    def step_s(self) -> float | None:
        """Mean time of a token after the first ones; None if there is none."""
        later = self.new_tokens - self.first_tokens
        return (self.latency_s - self.first_s) / later if later > 0 else None


@dataclass(frozen=True)
class Agreement:
    """How far a text is ordinary decoding's."""

    equal: int
    """Tokens before the first that differs."""
    compared: int
    """Tokens of the longer text."""
    gap: float | None = None
    """Ordinary decoding's score for its own token minus that for the other one, where they first differ."""


@dataclass(frozen=True)
class Pair:
    """A text by ordinary decoding and by a method."""

    ordinary: TextRun
    run: TextRun
    agreement: Agreement


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class MethodFigures:
    """What some paired runs say of a method; None if they say nothing."""

    texts: int
    new_tokens: int
    tokens_per_second: float
    """All new tokens over all latencies, the prompts' passes included."""
    speedup: Spread
    """Each pair's tokens per second over ordinary decoding's."""
    step_speedup: Spread | None
    """The same after the first token, without prompts."""
    pooled_step_speedup: float | None
    """The same of all texts together, like s, CR and c: compare it with the allowed one."""
    allowed_speedup: float | None
    """What s, CR and c allow after the first token by SWIFT's equation 6; what Theorem 4.1 allows for PPD."""
    acceptance_rate: float | None
    """α."""
    mean_accepted_length: float
    """M: new tokens for each full pass, the prompt's among them (SWIFT, appendix B.3)."""
    compression_rate: float
    """CR (Kangaroo, equation 1)."""
    ctar: tuple[float | None, ...]
    """CTAR(w) for `WINDOWS`: share of the verifications that gave more than w tokens (Kangaroo, equation 2)."""
    draft_steps: float | None
    """s."""
    draft_cost: float | None
    """c, measured."""
    verification_cost: float | None
    """v: a verification's time over that of an ordinary step."""
    cpu_share: float
    """This process' CPU time over the latencies: below the number of threads if others use the cores too."""
    equal_texts: float
    """Share of the texts that are ordinary decoding's to the last token."""
    equal_tokens: float
    """Share of the tokens that come before a text's first difference."""
    largest_gap: float | None
    """The largest gap of scores (logits if greedy) at a first difference."""


def method_figures(pairs: Sequence[Pair]) -> MethodFigures:
    """Sum up one method's pairs; there must be one at least."""
    runs = [pair.run for pair in pairs]
    steps = [(o, m) for o, m in ((pair.ordinary.step_s, pair.run.step_s) for pair in pairs) if o and m]
    drafts = [run.drafting for run in runs if run.drafting]
    lengths = [length for draft in drafts for length in draft.lengths]
    drafted, accepted = (sum(sum(getattr(draft, name)) for draft in drafts) for name in ("drafted", "accepted"))
    new_tokens = sum(run.new_tokens for run in runs)
    compression_rate = float(np.mean(lengths)) if lengths else 1.0
    draft_cost = _draft_cost(pairs)
    gaps = [abs(pair.agreement.gap) for pair in pairs if pair.agreement.gap is not None]
    draft_steps = drafted / len(lengths) if lengths else None
    return MethodFigures(
        texts=len(pairs),
        new_tokens=new_tokens,
        tokens_per_second=new_tokens / sum(run.latency_s for run in runs),
        speedup=spread([_rate(pair.run) / _rate(pair.ordinary) for pair in pairs]),
        step_speedup=spread([ordinary / method for ordinary, method in steps]) if steps else None,
        pooled_step_speedup=_pooled_step_speedup(pairs),
        allowed_speedup=_theorem_speedup(pairs) or allowed_speedup(compression_rate, draft_steps, draft_cost),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=new_tokens / (len(runs) + len(lengths)) if drafts else 1.0,
        compression_rate=compression_rate,
        ctar=tuple(
            sum(length > window for length in lengths) / len(lengths) if lengths else None for window in WINDOWS
        ),
        draft_steps=draft_steps,
        draft_cost=draft_cost,
        verification_cost=_verification_cost(pairs),
        cpu_share=sum(run.cpu_s for run in runs) / sum(run.latency_s for run in runs),
        equal_texts=float(np.mean([pair.agreement.equal == pair.agreement.compared for pair in pairs])),
        equal_tokens=sum(pair.agreement.equal for pair in pairs) / sum(pair.agreement.compared for pair in pairs),
        largest_gap=max(gaps, default=None),
    )


def allowed_speedup(compression_rate: float, draft_steps: float | None, draft_cost: float | None) -> float | None:
    """SWIFT's equation 6 with the measured s and c; None if nothing was drafted.

    Its M is the tokens of a verification, without the prompt's pass, which is the same in ordinary decoding.
    """
    if draft_steps is None or draft_cost is None:
        return None
    return 1 / drafting_ratio(max(compression_rate, 1.0), draft_steps, max(draft_cost, 0.0))


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of one value at least."""
    return Spread(*quartiles(values))


def _rate(run: TextRun) -> float:
    return run.new_tokens / run.latency_s


def _pooled_step_speedup(pairs: Sequence[Pair]) -> float | None:
    """Ordinary decoding's time for the tokens after the first ones over the method's."""
    known = [(p.run, p.ordinary.step_s, p.run.step_s) for p in pairs if p.ordinary.step_s and p.run.step_s]
    ordinary_s, method_s = (
        sum((run.new_tokens - run.first_tokens) * steps[i] for run, *steps in known) for i in (0, 1)
    )
    return ordinary_s / method_s if known else None


def _draft_cost(pairs: Sequence[Pair]) -> float | None:
    """c, without what drafting ran for verification."""
    return _cost(pairs, lambda ordinary, draft: draft.draft_s - _reused_s(ordinary, draft), lambda d: sum(d.drafted))


def _verification_cost(pairs: Sequence[Pair]) -> float | None:
    return _cost(pairs, lambda ordinary, draft: draft.verify_s + _reused_s(ordinary, draft), lambda d: len(d.lengths))


def _cost(
    pairs: Sequence[Pair], seconds: Callable[[TextRun, Drafting], float], steps: Callable[[Drafting], int]
) -> float | None:
    """A step's mean time over that of an ordinary step."""
    drafts = [(p.ordinary, p.run.drafting, p.ordinary.step_s) for p in pairs if p.run.drafting and p.ordinary.step_s]
    ordinary_s = sum(steps(draft) * step_s for _, draft, step_s in drafts)
    return sum(seconds(ordinary, draft) for ordinary, draft, _ in drafts) / ordinary_s if ordinary_s else None


def _reused_s(ordinary: TextRun, draft: Drafting) -> float:
    return draft.reused_share * ordinary.layers_s * len(draft.lengths)


def _theorem_speedup(pairs: Sequence[Pair]) -> float | None:
    """The speed-up that predicted ratios allow after the first tokens."""
    later = [(p.run.predicted_ratio, (p.run.new_tokens - 1) * (p.ordinary.step_s or 0.0)) for p in pairs]
    known = [(ratio, seconds) for ratio, seconds in later if ratio is not None]
    predicted_s = sum(ratio * seconds for ratio, seconds in known)
    return sum(seconds for _, seconds in known) / predicted_s if predicted_s else None
