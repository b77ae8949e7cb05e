"""How well acceptance is predicted: by a probe, and by the draft's own confidence."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Forecast:
    """Probabilities of acceptance beside what happened."""

    loss: float
    """Binary cross-entropy, nats a token."""
    accuracy: float
    """Share of the tokens for which a probability of more than a half predicts what happens."""
    auc: float
    """How often an accepted token has a higher probability than a rejected one; ties count half."""


@dataclass(frozen=True)
class ProbeReport:
    """What a probe reaches on text."""

    num_tokens: int
    accepted: float
    """Share of the tokens whose draft full depth chooses: always yes is right as often, always no for the rest."""
    probe: Forecast
    confidence: Forecast
    """The draft token's own probability instead, as in Draft & Verify and AdaSPEED without a probe."""

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


@torch.no_grad()
def report_probe(
    probe: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor], passes: Iterable[tuple[Tensor, Tensor, Tensor]]
) -> ProbeReport:
    """A probe on given text, greedy.

    Args:
        probe: hidden states `[1, tokens, hidden_size]` → probabilities `[1, tokens]`.
        head: hidden states → the draft's logits `[1, tokens, vocab_size]`.
        passes: for each text, one at least, the states after the exit layer, full depth's logits, and the next tokens.
    """
    foretold, confident, happened = [], [], []
    for states, final_logits, _ in passes:
        confidence, drafts = head(states).float().softmax(-1).max(-1)
        foretold.append(probe(states)[0].cpu().numpy())
        confident.append(confidence[0].cpu().numpy())
        happened.append((drafts == final_logits.argmax(-1))[0].cpu().numpy())
    accepted = np.concatenate(happened)
    forecasts = (forecast(np.concatenate(each), accepted) for each in (foretold, confident))
    return ProbeReport(len(accepted), float(accepted.mean()), *forecasts)


def forecast(probabilities: np.ndarray, accepted: np.ndarray) -> Forecast:
    """Both `[tokens]`."""
    likelihoods = np.where(accepted, probabilities, 1 - probabilities).astype(float)
    loss = -np.log(np.maximum(likelihoods, 1e-12)).mean()
    return Forecast(
        float(loss), float(((probabilities > 0.5) == accepted).mean()), area_under_curve(probabilities, accepted)
    )


def area_under_curve(scores: np.ndarray, accepted: np.ndarray) -> float:
    """Area under the ROC curve, by the Mann-Whitney statistic; 0.5 if all are accepted, or none."""
    rejected, pairs = np.sort(scores[~accepted]), int(accepted.sum()) * int((~accepted).sum())
    if not pairs:
        return 0.5
    below, not_above = (np.searchsorted(rejected, scores[accepted], side) for side in ("left", "right"))
    return float((below + not_above).sum() / 2 / pairs)
