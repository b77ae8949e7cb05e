"""Affine exit heads for several layers of a model, trained side by side on kept states."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.trained.heads import AffineHead
from ppd_runtime.training.adapt.least_squares import fit_affine
from ppd_runtime.training.adapt.states import KeptStates
from ppd_runtime.training.adapt.timed import TimedTraining, bfloat16_products
from ppd_runtime.training.adapt.work_folder import WorkFolder
from ppd_runtime.training.recipe import Recipe

_BATCHES = Recipe(batch_size=1024, epochs=20)  # of places
_PLACES_AT_ONCE = 4096
_LEAST_STEPS = 200  # that few places get
OUTSIDE = -100
"""The label of a token that the shortlist lacks."""


def labels_of(choices: Tensor, tokens: Sequence[int], vocab_size: int) -> Tensor:
    """The places of tokens in a shortlist, `OUTSIDE` for others."""
    places = torch.full((vocab_size,), OUTSIDE)
    places[torch.tensor(tokens)] = torch.arange(len(tokens))
    return places[choices]


class HeadsTraining(TimedTraining):
    """Trains heads to name full depth's choice, by cross-entropy over a shortlist; only the affine maps learn.

    Args:
        end: the model's, from `model_end`.
        kept: states.
        layers: those that get heads.
        labels: `[places]`, from `labels_of`.
        places: the numbers of those to learn from, whose labels are in the shortlist.
        folder: see `TimedTraining`.
        settings: see `TimedTraining`.
    """

    def __init__(
        self,
        end: PreTrainedModel,
        kept: KeptStates,
        layers: Sequence[int],
        labels: Tensor,
        places: Tensor,
        folder: WorkFolder,
        settings: Mapping[str, Any],
    ) -> None:
        self.heads = {layer: AffineHead(end) for layer in layers}
        """By their layers."""
        self._states = {layer: kept.states(layer) for layer in layers}
        self._final = kept.states(num_layers) if (num_layers := end.config.num_hidden_layers) in kept.layers else None
        self._labels, self._places, self._device = labels, places, end.device
        self.num_places = len(places)
        network = nn.ModuleDict({str(layer): head for layer, head in self.heads.items()})
        super().__init__("heads", network, max(_BATCHES.num_steps(len(places)), _LEAST_STEPS), folder, settings)

    def begin(self) -> None:
        """Implements `Training.begin`: each head is the affine map into the last layer's states, if these are kept."""
        if self._final is None:
            return
        for layer, head in self.heads.items():
            fit_affine(head.step, self._pairs(self._states[layer], self._final))

    def _pairs(self, states: Tensor, final: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for places in self._places.split(_PLACES_AT_ONCE):
            before = states[places].to(self._device, torch.float32)
            yield before, final[places].to(self._device, torch.float32) - before

    def add_gradients(self, step: int) -> float:
        """Add the gradients of all heads' losses at a step's places; gives the heads' mean loss."""
        batch = self._places[torch.from_numpy(_BATCHES.batch(step, self.num_places)).sort().values]
        labels, total = self._labels[batch].to(self._device), 0.0
        for layer, states in self._states.items():
            with bfloat16_products(self._device):
                logits = self.heads[layer](states[batch].to(self._device, torch.float32)[None])[0]
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            total += float(loss.detach())
        return total / len(self._states)
