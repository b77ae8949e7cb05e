"""What guesses are worth: shares of held-out tokens that they name, and what stages gain by them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.cost_model.staged import speedup_bound
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.training.adapt.head_choice import HeadChoice
from ppd_runtime.training.adapt.heads import OUTSIDE, labels_of
from ppd_runtime.tune.match_rates import places_among_best

KS = (1, 3, 5)
ALL = "all"
"""The kind of all places together."""
GREEDY, SAMPLED = "greedy", "sampled"
"""Full depth's choices: the highest logit; or at temperature 1, the highest sum of a logit and the shared noise."""
BEFORE, AFTER, DRAFTER_STEP = "before", "after", "drafter"
"""Where guesses come from: the model's own norm and head after a layer, the trained head there, a drafter's step."""

Guesser = tuple[str, int]
"""One of these, with the layer or the number of the drafter's step."""
Shares = dict[str, dict[int, float]]
"""By kind of prompt and k."""


@dataclass(frozen=True)
class LayerReport:
    """How often the head for a layer names full depth's choice among its k best."""

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
class Comparison:
    """How often guesses name full depth's choices of one way to choose; all guesses are tokens of the shortlist."""

    covered: float
    """Share of the choices that the shortlist has; others count as wrong."""
    layers: tuple[LayerReport, ...]
    stages: tuple[StagesReport, ...]
    drafter: tuple[Shares, ...]
    """How often a drafter is right about the first token, the second behind the right first, and so on."""


@dataclass(frozen=True)
class AdaptReport:
    """What an adaptation made, and what it reaches on held-out prompts."""

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
    greedy: Comparison
    sampled: Comparison
    """At temperature 1; guesses are ranked with the noise that full depth's choice is drawn with, as stages do."""
    stayed: tuple[str, ...] = ()
    """The parts that were there before and stay, since the new ones foresee no more; a line on each."""
    plan: dict[str, Any] = field(default_factory=dict)
    """What the layouts that fit this machine took with the parts, as `ppd plan --json` tells it, and its table; the
    `verdict` alone if they were not measured."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


class HeldOut:
    """Ranks of full depth's choices among guesses, text by text: the highest of `KS` for one that is not among them.

    Args:
        model: whole; its norm and head choose.
        tokens: the shortlist, which guesses name.
    """

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int]) -> None:
        self._model, self._head, self._tokens = model, FinalHead(model), torch.tensor(tokens)
        self.kinds: list[str] = []
        """Of all places."""
        self._labels: dict[str, list[Tensor]] = {GREEDY: [], SAMPLED: []}
        self._ranks: dict[str, dict[Guesser, list[Tensor]]] = {way: defaultdict(list) for way in self._labels}
        self._ranked_kinds: dict[Guesser, list[str]] = defaultdict(list)

    @torch.inference_mode()
    def add(
        self,
        kind: str,
        sampler: Sampler,
        position: int,
        labels: Tensor,
        final: Tensor,
        guesses: Iterable[tuple[Guesser, Tensor]],
    ) -> None:
        """Compare on a text.

        Args:
            kind: its prompt's.
            sampler: its own, at temperature 1.
            position: of the first choice.
            labels: `[places]`, from `labels_of`, of the greedy choices.
            final: `[places, hidden_size]` after the last layer.
            guesses: logits `[rows, tokens]` of the last places, by guesser.
        """
        logits = self._head(final.to(self._model.device, self._model.dtype)[None])[0].float().cpu()
        noise = sampler.noise(position, *logits.shape)
        sampled = labels_of(sampler.scores(logits, noise).argmax(-1), self._tokens.tolist(), logits.shape[1])
        noise = noise[:, self._tokens]
        for way, wanted in ((GREEDY, labels), (SAMPLED, sampled)):
            self._labels[way].append(wanted)
        self.kinds += [kind] * len(labels)
        for guesser, guessed in guesses:
            scores = guessed.float().cpu()
            self._ranked_kinds[guesser] += [kind] * len(scores)
            for way, ranked in ((GREEDY, scores), (SAMPLED, sampler.scores(scores, noise[-len(scores) :]))):
                wanted = self._labels[way][-1][-len(scores) :]
                self._ranks[way][guesser].append(places_among_best(ranked, wanted, max(KS)))

    @property
    def shortlist(self) -> int:
        """The number of its tokens."""
        return len(self._tokens)

    def comparison(self, way: str, layouts: Iterable[Sequence[int]]) -> Comparison:
        """What was found for one way to choose, and for stages with these cuts."""
        ranks = {guesser: torch.cat(found) for guesser, found in self._ranks[way].items()}
        named = {guesser: shares(ranks[guesser], self._ranked_kinds[guesser]) for guesser in ranks}
        before, after = ({layer: ranks[one, layer] for one, layer in ranks if one == when} for when in (BEFORE, AFTER))
        return Comparison(
            covered=float((torch.cat(self._labels[way]) != OUTSIDE).float().mean()),
            layers=tuple(LayerReport(layer, named[BEFORE, layer], named[AFTER, layer]) for layer in sorted(after)),
            stages=tuple(stages_report(cuts, before, after) for cuts in layouts),
            drafter=tuple(named[guesser] for guesser in sorted(ranks) if guesser[0] == DRAFTER_STEP),
        )


def shares(ranked: Tensor, kinds: Sequence[str]) -> Shares:
    """The shares of places whose rank is below k, by kind of the place."""
    of_kind = {ALL: torch.ones(len(kinds), dtype=torch.bool)}
    of_kind |= {kind: torch.tensor([kind == other for other in kinds]) for kind in sorted(set(kinds))}
    return {kind: {k: float((ranked[rows] < k).float().mean()) for k in KS} for kind, rows in of_kind.items()}


def stages_report(cuts: Sequence[int], before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> StagesReport:
    """The bound for stages with these cuts; ranks are by layer."""
    bounds = ({k: _bound([ranked[cut] < k for cut in cuts]) for k in KS} for ranked in (before, after))
    return StagesReport(tuple(cuts), *bounds)


def _bound(hits: Sequence[Tensor]) -> float:
    """N/E[J] where each boundary is right at some places."""
    of_all = torch.stack([*hits, torch.ones_like(hits[0])])
    first = of_all.int().argmax(0)
    return speedup_bound([float((first == boundary).double().mean()) for boundary in range(len(of_all))])
