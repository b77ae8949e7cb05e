"""Exit heads of two kinds for several layers of a model, trained side by side on kept states."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.heads import AFFINE, GATED, HeadInfo, HeadNetwork, new_head, normed
from ppd_runtime.training.adapt.head_choice import CHOSEN_BY_K, EARLIER, OWN, HeadChoice, TriedHead, choose_head
from ppd_runtime.training.adapt.least_squares import fit_affine
from ppd_runtime.training.adapt.states import KeptStates
from ppd_runtime.training.adapt.timed import TimedTraining, bfloat16_products
from ppd_runtime.training.adapt.work_folder import WorkFolder
from ppd_runtime.training.recipe import Recipe
from ppd_runtime.tune.match_rates import places_among_best

TRAINED = (AFFINE, GATED)
"""The kinds that are trained for each layer, the cheapest first."""
_BATCHES = Recipe(batch_size=1024, epochs=20)  # of places
_PLACES_AT_ONCE, _ROWS_AT_ONCE = 4096, 256
_LEAST_STEPS = 200  # that few places get
_AFFINE_EVERY = 2
"""Affine heads, which the closed form leaves little to learn, take part in every so many steps."""
OUTSIDE = -100
"""The label of a token that the shortlist lacks."""


def labels_of(choices: Tensor, tokens: Sequence[int], vocab_size: int) -> Tensor:
    """The places of tokens in a shortlist, `OUTSIDE` for others."""
    places = torch.full((vocab_size,), OUTSIDE)
    places[torch.tensor(tokens)] = torch.arange(len(tokens))
    return places[choices]


class HeadsTraining(TimedTraining):
    """Trains heads to name full depth's choice over a shortlist; only the heads' maps learn.

    The loss is cross-entropy to full depth's chances where its states are kept, else to its choice.

    Args:
        end: the model's, from `model_end`.
        kept: states.
        layers: those that get heads.
        labels: `[places]`, from `labels_of`.
        places: the numbers of those to learn from, whose labels are in the shortlist.
        folder: see `TimedTraining`.
    """

    def __init__(
        self,
        end: PreTrainedModel,
        kept: KeptStates,
        layers: Sequence[int],
        labels: Tensor,
        places: Tensor,
        folder: WorkFolder,
    ) -> None:
        self._learners = {(layer, kind): new_head(kind, end) for layer in layers for kind in TRAINED}
        self._own = new_head(AFFINE, end)
        self.heads: dict[int, HeadNetwork] = {}
        """Those that `choose` chose, by their layers."""
        self.choices: dict[int, HeadChoice] = {}
        self._states = {layer: kept.states(layer) for layer in layers}
        self._final = kept.states(num_layers) if (num_layers := end.config.num_hidden_layers) in kept.layers else None
        self._labels, self._places, self._device = labels, places, end.device
        self._final_head = FinalHead(end)
        self.num_places = len(places)
        network = nn.ModuleDict({f"{layer}-{kind}": head for (layer, kind), head in self._learners.items()})
        super().__init__("heads", network, max(_BATCHES.num_steps(len(places)), _LEAST_STEPS), folder)

    def begin(self) -> None:
        """Implements `Training.begin`: each head is the affine map into the last layer's states, if these are kept."""
        if self._final is None:
            return
        for number, ((layer, kind), head) in enumerate(self._learners.items(), 1):
            step, pairs = head.get_submodule("step"), self._pairs(layer, kind, self._final)
            assert isinstance(step, nn.Linear)
            fit_affine(step, self.in_time(pairs, number / len(self._learners)))

    def end(self) -> None:
        """Implements `TimedTraining.end`."""
        HeadInfo.round_as_stored(self.network)

    def _pairs(self, layer: int, kind: str, final: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """States after a layer as the kind's map reads them, and what it should add to them."""
        for places in self._places.split(_PLACES_AT_ONCE):
            before, after = (self._some(states, places) for states in (self._states[layer], final))
            if kind == GATED:
                before, after = normed(before), normed(after)
            yield before, after - before

    def add_gradients(self, step: int) -> float:
        """Add the gradients of heads' losses at a step's places; gives their mean loss."""
        batch = self._places[torch.from_numpy(_BATCHES.batch(step, self.num_places)).sort().values]
        target, total = self._target(batch), 0.0
        kinds = (GATED,) if step % _AFFINE_EVERY else TRAINED
        for layer, states in self._states.items():
            before = self._some(states, batch)
            for kind in kinds:
                with bfloat16_products(self._device):
                    logits = self._learners[layer, kind](before[None])[0]
                loss = F.cross_entropy(logits.float(), target)
                loss.backward()
                total += float(loss.detach())
        return total / (len(self._states) * len(kinds))

    @torch.no_grad()
    def _target(self, places: Tensor) -> Tensor:
        """Full depth's chances `[places, shortlist]`, else its choices `[places]`."""
        if self._final is None:
            return self._labels[places].to(self._device)
        with bfloat16_products(self._device):
            logits = self._final_head(self._some(self._final, places)[None])[0]
        return logits.float().softmax(-1)

    def _some(self, states: Tensor, places: Tensor) -> Tensor:
        return states[places].to(self._device, torch.float32)

    def choose(self, held_out: Tensor, model_numbers: int, earlier: Mapping[int, HeadNetwork] | None = None) -> None:
        """Set `heads` and `choices` by the numbers of held-out places, for a model with so many weights.

        A layer's `earlier` head stays unless another one gains more.
        """
        before = {layer: {EARLIER: head} for layer, head in (earlier or {}).items()}
        for layer in self._states:
            heads = {**before.get(layer, {}), OWN: self._own, **{kind: self._learners[layer, kind] for kind in TRAINED}}
            tried = {kind: self._tried_head(layer, head, held_out) for kind, head in heads.items()}
            self.choices[layer] = choose_head(layer, tried, model_numbers)
            self.heads[layer] = heads[self.choices[layer].kind]

    @torch.inference_mode()
    def _tried_head(self, layer: int, head: HeadNetwork, held_out: Tensor) -> TriedHead:
        right = 0
        for places in held_out.split(_ROWS_AT_ONCE):
            logits = head(self._some(self._states[layer], places)[None])[0].float()
            ranks = places_among_best(logits, self._labels[places].to(self._device), CHOSEN_BY_K)
            right += int((ranks < CHOSEN_BY_K).sum())
        numbers = 0 if head is self._own else sum(parameter.numel() for parameter in head.parameters())
        return TriedHead(right / max(1, len(held_out)), numbers)
