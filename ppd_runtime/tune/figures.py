"""What pairs of texts say of a way of decoding beside another one, as plain numbers; times in seconds.

The symbols are those of SWIFT's equation 6 and of Kangaroo's section 3: α the acceptance rate, M tokens for each full
pass, CR tokens for each verification, s draft steps for each verification, c the time of a draft step over that of an
ordinary step, v that of a verification.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppd_runtime.cost_model.theory import drafting_ratio, realised_saving
from ppd_runtime.tune.compare import Drafting, Pair, Text

WINDOWS = tuple(range(1, 7))
"""The w of CTAR(w), as in Kangaroo's Figure 3."""


@dataclass(frozen=True)
class Spread:
    """First quartile, median and third quartile."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles of one value at least.

    They stand a quarter, half and three quarters of the way from the first of the sorted values to the last, and are
    interpolated linearly between two values.
    """
    several = values if len(values) > 1 else [*values, *values]
    return Spread(*statistics.quantiles(several, n=4, method="inclusive"))


@dataclass(frozen=True)
class Figures:
    """What some pairs say of a way; None if they say nothing."""

    texts: int
    new_tokens: int
    tokens_per_second: float
    """All new tokens over all latencies, the prompts' passes included."""
    speedup: Spread
    """Each pair's tokens per second over ordinary decoding's."""
    ms_per_token: float | None
    """Time of a token after the first ones, median of the texts."""
    ordinary_ms_per_token: float | None
    """Ordinary decoding's time of such a token, median of the texts."""
    step_speedup: Spread | None
    """Ordinary decoding's time of a token after the first ones over this way's, of each pair."""
    allowed_speedup: float | None
    """What s, CR and c allow after the first token by SWIFT's equation 6; what Theorem 4.1 or N/E[J] allow for PPD."""
    acceptance_rate: float | None
    """α: accepted drafts among draft steps."""
    mean_accepted_length: float
    """M: new tokens for each full pass, the prompt's among them (SWIFT, appendix B.3)."""
    compression_rate: float
    """CR (Kangaroo, equation 1)."""
    ctar: tuple[float | None, ...]
    """CTAR(w) for `WINDOWS`: share of the verifications that gave more than w tokens (Kangaroo, equation 2)."""
    draft_steps: float | None
    """s: draft steps for each verification."""
    draft_cost: float | None
    """c: the measured time of a draft step over that of an ordinary step."""
    verification_cost: float | None
    """v: a verification's time over that of an ordinary step."""
    equal_texts: float
    """Share of the texts that are ordinary decoding's to the last token."""
    equal_tokens: float
    """Share of the tokens that come before a text's first difference."""


def figures(pairs: Sequence[Pair]) -> Figures:
    """Sum up the pairs of one way; there must be one at least."""
    texts = [pair.text for pair in pairs]
    steps = [(o, t) for o, t in ((pair.ordinary.step_s, pair.text.step_s) for pair in pairs) if o and t]
    drafts = [text.drafting for text in texts if text.drafting]
    lengths = [length for draft in drafts for length in draft.lengths]
    drafted, accepted = (sum(sum(getattr(draft, name)) for draft in drafts) for name in ("drafted", "accepted"))
    new_tokens = sum(len(text.token_ids) for text in texts)
    compression_rate = statistics.fmean(lengths) if lengths else 1.0
    draft_steps = drafted / len(lengths) if lengths else None
    # c is without what drafting ran for verification, v is with it
    draft_cost = _cost(pairs, lambda ordinary, d: d.draft_s - _reused_s(ordinary, d), lambda d: sum(d.drafted))
    return Figures(
        texts=len(pairs),
        new_tokens=new_tokens,
        tokens_per_second=new_tokens / sum(text.latency_s for text in texts),
        speedup=spread([_rate(pair.text) / _rate(pair.ordinary) for pair in pairs]),
        ms_per_token=1000 * statistics.median(t for _, t in steps) if steps else None,
        ordinary_ms_per_token=1000 * statistics.median(o for o, _ in steps) if steps else None,
        step_speedup=spread([o / t for o, t in steps]) if steps else None,
        allowed_speedup=_predicted_speedup(pairs) or allowed_speedup(compression_rate, draft_steps, draft_cost),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=new_tokens / (len(texts) + len(lengths)) if drafts else 1.0,
        compression_rate=compression_rate,
        ctar=tuple(
            sum(length > window for length in lengths) / len(lengths) if lengths else None for window in WINDOWS
        ),
        draft_steps=draft_steps,
        draft_cost=draft_cost,
        verification_cost=_cost(pairs, lambda o, d: d.verify_s + _reused_s(o, d), lambda d: len(d.lengths)),
        equal_texts=sum(pair.identical for pair in pairs) / len(pairs),
        equal_tokens=sum(pair.equal for pair in pairs)
        / sum(max(len(text.token_ids) for text in pair) for pair in pairs),
    )


def allowed_speedup(compression_rate: float, draft_steps: float | None, draft_cost: float | None) -> float | None:
    """SWIFT's equation 6 with the measured s and c; None if nothing was drafted.

    Its M is the tokens of a verification, without the prompt's pass, which is the same in ordinary decoding.
    """
    if draft_steps is None or draft_cost is None:
        return None
    return 1 / drafting_ratio(max(compression_rate, 1.0), draft_steps, max(draft_cost, 0.0))


def saving_share(speedup: float, allowed: float | None) -> float | None:
    """The realised share of the saving that a speed-up is allowed; None if none is allowed."""
    return None if allowed is None or allowed <= 1 else realised_saving(1 / speedup, 1 / allowed)


def predicted_step_ratio(text: Text) -> float | None:
    """E[J]/N, or Theorem 4.1 without the first token, whose pass over the prompt every way of decoding has.

    None for ways without candidates, and for texts of a pause of guessing, in which nothing is known.
    """
    stats, tokens = text.stats, len(text.token_ids)
    if stats is None or stats.speculation or tokens == 1:
        return None
    if sum(stats.first_boundary):
        return stats.predicted_ratio
    if not stats.asked or stats.match_rate is None:
        return None
    return (stats.predicted_ratio * tokens - 1) / (tokens - 1)


def _rate(text: Text) -> float:
    return len(text.token_ids) / text.latency_s


def _cost(
    pairs: Sequence[Pair], seconds: Callable[[Text, Drafting], float], steps: Callable[[Drafting], int]
) -> float | None:
    """A step's mean time over that of an ordinary step."""
    drafts = [(p.ordinary, p.text.drafting, p.ordinary.step_s) for p in pairs if p.text.drafting and p.ordinary.step_s]
    ordinary_s = sum(steps(draft) * step_s for _, draft, step_s in drafts)
    return sum(seconds(ordinary, draft) for ordinary, draft, _ in drafts) / ordinary_s if ordinary_s else None


def _reused_s(ordinary: Text, draft: Drafting) -> float:
    layers_s = ordinary.stats.ledger_per_token.layers_s if ordinary.stats else 0.0
    return draft.reused_share * layers_s * len(draft.lengths)


def _predicted_speedup(pairs: Sequence[Pair]) -> float | None:
    """The speed-up that predicted ratios allow after the first tokens, the texts weighted by ordinary time."""
    later = [(predicted_step_ratio(p.text), (len(p.text.token_ids) - 1) * (p.ordinary.step_s or 0.0)) for p in pairs]
    known = [(ratio, seconds) for ratio, seconds in later if ratio is not None]
    predicted_s = sum(ratio * seconds for ratio, seconds in known)
    return sum(seconds for _, seconds in known) / predicted_s if predicted_s else None
