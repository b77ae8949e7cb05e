"""Trains a drafter on kept states, over several steps of its own: it learns to go on from what it guessed itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.models.trained.drafter import DrafterNetwork
from ppd_runtime.training.adapt.heads import OUTSIDE
from ppd_runtime.training.adapt.states import KeptStates
from ppd_runtime.training.adapt.timed import TimedTraining
from ppd_runtime.training.adapt.work_folder import WorkFolder
from ppd_runtime.training.recipe import Recipe

OWN_STEPS = 3
"""Tokens in a row that it learns to foresee."""
_BATCHES = Recipe(batch_size=8, epochs=30)  # of texts


@dataclass(frozen=True)
class DraftedText:
    """The places of a text that a drafter can read: each has a place before it."""

    tokens: Sequence[int]
    """`[tokens]`: at the places."""
    before: range
    """The numbers of the places before them."""


def drafted(token_ids: Sequence[int], first: int, places: range) -> DraftedText:
    """A kept text as a drafter reads it; `first` is the `Text`'s."""
    return DraftedText(token_ids[first : first + len(places) - 1], places[:-1])


class DrafterTraining(TimedTraining):
    """Trains a drafter's network by cross-entropy to full depth's choices over a shortlist.

    Windows of attention are left out: the texts are short.

    Args:
        network: the drafter's.
        kept: states, those after `layers` among them.
        layers: those that the drafter reads, the model's last one at the end.
        labels: `[places]`, from `labels_of`.
        texts: those to learn from.
        folder: see `TimedTraining`.
        settings: see `TimedTraining`.
    """

    def __init__(
        self,
        network: DrafterNetwork,
        kept: KeptStates,
        layers: Sequence[int],
        labels: Tensor,
        texts: Sequence[DraftedText],
        folder: WorkFolder,
        settings: Mapping[str, Any],
    ) -> None:
        self._states, self._labels, self._texts = [kept.states(layer) for layer in layers], labels, texts
        self.learner, self._decoder = network, layer_range(network.behind, 0, 1)
        self._head, self._device = FinalHead(network.behind), network.behind.device
        super().__init__("drafter", network, _BATCHES.num_steps(len(texts)), folder, settings)

    def add_gradients(self, step: int) -> float:
        """Add the gradients of some texts' losses; gives the mean loss of the drafter's steps."""
        scores, labels = self.scores([self._texts[number] for number in _BATCHES.batch(step, len(self._texts))])
        losses = [
            F.cross_entropy(logits[:, own:].flatten(0, 1), labels[:, own:].flatten(), ignore_index=OUTSIDE)
            for own, logits in enumerate(scores)
        ]
        loss = torch.stack([loss for loss in losses if loss.isfinite()]).mean()
        loss.backward()
        return float(loss.detach())

    def scores(self, texts: Sequence[DraftedText]) -> tuple[list[Tensor], Tensor]:
        """For each step of the drafter's own, logits of the token after each place, and the labels, `OUTSIDE` at ends.

        `[texts, longest, shortlist]` and `[texts, longest]`. With step s a place is the s-th guess behind a certain
        token, so the first s places of a text have no meaning there.
        """
        embedded = pad_sequence([self.learner.embedded(text.tokens) for text in texts], batch_first=True)
        states = [torch.stack([some[_slice(text.before)] for some in self._states], dim=1) for text in texts]
        after = [self._labels[_slice(text.before, 1)] for text in texts]
        labels = pad_sequence(after, batch_first=True, padding_value=OUTSIDE).to(self._device)
        own = self._own_states(embedded, pad_sequence(states, batch_first=True).to(self._device, torch.float32))
        return [self._head(hidden).float() for hidden in own], labels

    def _own_states(self, embedded: Tensor, states: Tensor) -> list[Tensor]:
        """The drafter's states at each step of its own, `[texts, longest, hidden_size]`."""
        size = embedded.shape[1]
        positions, mask = torch.arange(size, device=self._device)[None], _mask(size, self._device)
        inputs, found = [self.learner.certain(embedded, states)], list[Tensor]()
        for own in range(OWN_STEPS):
            rows = (own + 1) * size
            hidden = self._decoder(
                inputs_embeds=torch.cat(inputs, dim=1),
                position_ids=positions.repeat(1, own + 1),
                attention_mask=mask[:, :, :rows, :rows],
                use_cache=False,
            ).last_hidden_state
            found.append(hidden[:, -size:])
            before = F.pad(found[-1][:, :-1], (0, 0, 1, 0))
            inputs.append(self.learner.guessed(embedded, before))
        return found


def _mask(size: int, device: torch.device) -> Tensor:
    """What the inputs of all steps see, additive, `[1, 1, rows, rows]`; a step's rows come after those before.

    The s-th guess behind a certain token sees the certain tokens up to that, the guesses between, and itself.
    """
    place = torch.arange(size, device=device)
    ahead = place[None] - place[:, None]
    sees = [
        torch.cat([ahead <= -own, *(ahead == other - own for other in range(1, OWN_STEPS))], dim=1)
        for own in range(OWN_STEPS)
    ]
    seen = torch.cat(sees)
    for own in range(1, OWN_STEPS):  # later guesses than its own
        seen[own * size : (own + 1) * size, (own + 1) * size :] = False
    seen[:size, size:] = False
    rows = torch.arange(len(seen), device=device)
    seen[rows, rows] = True  # rows without meaning see themselves
    return torch.zeros(seen.shape, device=device).masked_fill_(~seen, torch.finfo(torch.float32).min)[None, None]


def _slice(places: range, ahead: int = 0) -> slice:
    return slice(places.start + ahead, places.stop + ahead)
