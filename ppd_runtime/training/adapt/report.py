"""What the heads are worth: shares of held-out tokens that they name, before and after, and what stages gain by it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.cost_model.staged import speedup_bound
from ppd_runtime.training.adapt.head_choice import HeadChoice
from ppd_runtime.training.adapt.heads import OUTSIDE
from ppd_runtime.tune.match_rates import places_among_best

KS = (1, 3, 5)
ALL = "all"
"""The kind of all places together."""
_ROWS = 256  # places whose logits are computed together

Shares = dict[str, dict[int, float]]
"""By kind of prompt and k."""


@dataclass(frozen=True)
class LayerReport:
    """How often the head for a layer names full depth's greedy choice among its k best."""

    layer: int
    before: Shares
    """The model's own norm and head."""
    after: Shares


@dataclass(frozen=True)
class StagesReport:
    """The most that stages may gain with these heads: N/E[J], by k."""

    cuts: tuple[int, ...]
    before: dict[int, float]
    after: dict[int, float]


@dataclass(frozen=True)
class AdaptReport:
    """What an adaptation made, and what it reaches on held-out prompts; both heads name tokens of the shortlist."""

    model: str
    folder: str
    texts: int
    """Answers, or texts that were read."""
    places: int
    """Tokens that the heads learned from."""
    steps: int
    minutes: float
    held_out: dict[str, int]
    """Held-out tokens by kind."""
    shortlist: int
    heads: tuple[HeadChoice, ...]
    covered: float
    """Share of the held-out tokens that the shortlist has; others count as wrong."""
    layers: tuple[LayerReport, ...]
    stages: tuple[StagesReport, ...]
    drafter: tuple[Shares, ...] = ()
    """How often a drafter is right about the first token, the second behind the right first, and so on."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


@torch.inference_mode()
def ranks(head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, device: torch.device) -> Tensor:
    """The place of each label among a head's best tokens, from 0; the highest of `KS` if it is not among them.

    Args:
        head: logits `[1, rows, tokens]` of states `[1, rows, hidden_size]`.
        states: `[rows, hidden_size]`.
        labels: `[rows]`.
        device: the head's.
    """
    found = []
    for some, wanted in zip(states.split(_ROWS), labels.split(_ROWS), strict=True):
        logits = head(some.to(device, torch.float32)[None])[0].float()
        found.append(places_among_best(logits, wanted.to(device), max(KS)).cpu())
    return torch.cat(found)


def shares(ranked: Tensor, kinds: Sequence[str]) -> Shares:
    """The shares of places whose rank is below k, by kind of the place."""
    of_kind = {ALL: torch.ones(len(kinds), dtype=torch.bool)}
    of_kind |= {kind: torch.tensor([kind == other for other in kinds]) for kind in sorted(set(kinds))}
    return {kind: {k: float((ranked[rows] < k).float().mean()) for k in KS} for kind, rows in of_kind.items()}


def stages_report(cuts: Sequence[int], before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> StagesReport:
    """The bound for stages with these cuts; ranks are by layer."""
    bounds = ({k: _bound([ranked[cut] < k for cut in cuts]) for k in KS} for ranked in (before, after))
    return StagesReport(tuple(cuts), *bounds)


def covered(labels: Tensor) -> float:
    """The share of labels that the shortlist has."""
    return float((labels != OUTSIDE).float().mean())


def _bound(hits: Sequence[Tensor]) -> float:
    """N/E[J] where each boundary is right at some places."""
    of_all = torch.stack([*hits, torch.ones_like(hits[0])])
    first = of_all.int().argmax(0)
    return speedup_bound([float((first == boundary).double().mean()) for boundary in range(len(of_all))])
