"""Trains a drafter on kept states, over several steps of its own: it learns to go on from what it guessed itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ppd_runtime.models.stage.embedding import Embedding
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.trained.drafter import DrafterInfo, DrafterNetwork, rotary_table
from ppd_runtime.models.trained.heads import model_end, normed
from ppd_runtime.training.adapt.least_squares import fit_affine
from ppd_runtime.training.adapt.states import KeptStates
from ppd_runtime.training.adapt.timed import TimedTraining, bfloat16_products
from ppd_runtime.training.adapt.work_folder import WorkFolder
from ppd_runtime.training.recipe import Recipe

OWN_STEPS = 3
"""Tokens in a row that it learns to foresee."""
_BATCHES = Recipe(batch_size=8, epochs=30)  # of texts
_RATE = 3e-4
_TEXTS_AT_ONCE, _ROWS_AT_ONCE = 64, 256


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


class KeptDrafts:
    """What a drafter's network names behind kept texts.

    Args:
        network: the drafter's, on the model's device.
        model: whole.
        tokens: the shortlist.
        kept: states, those after the last layer among them.
    """

    def __init__(
        self, network: DrafterNetwork, model: PreTrainedModel, tokens: Sequence[int], kept: KeptStates
    ) -> None:
        self._network, self._device, self._final = network, model.device, kept.states(kept.layers[-1])
        self._embed, self.head = Embedding(model), FinalHead(model_end(model, tokens))

    def scores(self, texts: Sequence[DraftedText]) -> list[Tensor]:
        """For each step of the drafter's own, logits of the token after each place, `[texts, longest, shortlist]`.

        With step s a place is the s-th guess behind a certain token, so the first s places of a text have no meaning.
        """
        return [self.head(hidden.float()).float() for hidden in self.own_states(texts)]

    def own_states(self, texts: Sequence[DraftedText]) -> list[Tensor]:
        """The drafter's states at each step of its own, `[texts, longest, hidden_size]`."""
        embedded = pad_sequence([self.embedded(text) for text in texts], batch_first=True)
        before = [self._final[_slice(text.before)] for text in texts]
        states = pad_sequence(before, batch_first=True).to(self._device, torch.float32)
        size, network = embedded.shape[1], self._network
        rotary, mask = rotary_table(size, self._device), _mask(size, self._device)
        found, keys, values = list[Tensor](), list[Tensor](), list[Tensor]()
        for own in range(OWN_STEPS):
            inputs = network.inputs(embedded, states)
            query, key, value = network.attended(inputs, rotary)
            keys.append(key)
            values.append(value)
            sees = mask[own * size : (own + 1) * size, : (own + 1) * size]
            attended = F.scaled_dot_product_attention(query, torch.cat(keys, -2), torch.cat(values, -2), attn_mask=sees)
            found.append(network.states(inputs, attended))
            states = F.pad(found[-1][:, :-1], (0, 0, 1, 0))
        return found

    def embedded(self, text: DraftedText) -> Tensor:
        """`[places, hidden_size]` of a text's tokens."""
        return self._embed(list(text.tokens))[0].float().clone()


class DrafterTraining(TimedTraining):
    """Trains a drafter's network to foresee full depth's chances of a shortlist's tokens, by cross-entropy to them.

    It begins with the affine map that is best by least squares.

    Args:
        model: whole.
        tokens: the shortlist.
        kept: states, those after the last layer among them.
        covered: `[places]`, whether the shortlist has full depth's choice.
        texts: those to learn from.
        folder: see `TimedTraining`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Sequence[int],
        kept: KeptStates,
        covered: Tensor,
        texts: Sequence[DraftedText],
        folder: WorkFolder,
    ) -> None:
        self._final, self._covered, self._texts = kept.states(kept.layers[-1]), covered, texts
        self._device, self.learner = model.device, DrafterNetwork(model.config.hidden_size).to(model.device)
        self.drafts = KeptDrafts(self.learner, model, tokens, kept)
        super().__init__("drafter", self.learner, _BATCHES.num_steps(len(texts)), folder, _RATE)

    def begin(self) -> None:
        """Implements `Training.begin`."""
        fit_affine(self.learner.mix, self.in_time(map(self._pairs, _parts(self._texts))))

    def end(self) -> None:
        """Implements `TimedTraining.end`."""
        DrafterInfo.round_as_stored(self.learner)

    def add_gradients(self, step: int) -> float:
        """Add the gradients of some texts' losses; gives the mean loss of the drafter's steps."""
        texts = [self._texts[number] for number in _BATCHES.batch(step, len(self._texts))]
        with bfloat16_products(self._device):
            own_states = self.drafts.own_states(texts)
        wanted = pad_sequence([self._after(self._final, text) for text in texts], batch_first=True)
        counts = pad_sequence([self._after(self._covered, text) for text in texts], batch_first=True)
        rows, places = torch.nonzero(counts, as_tuple=True)
        chosen = [states[rows, places].float() for states in own_states]
        leaves = [states.detach().requires_grad_() for states in chosen]
        total = 0.0
        for some in torch.arange(len(rows)).split(_ROWS_AT_ONCE):
            target = self._logits(wanted[rows[some], places[some]].to(self._device, torch.float32)).softmax(-1)
            for own, leaf in enumerate(leaves):
                known = some[places[some] >= own]
                chances = self._logits(leaf[known]).log_softmax(-1)
                loss = -(target[places[some] >= own] * chances).sum() / (len(rows) * OWN_STEPS)
                loss.backward()
                total += float(loss.detach())
        if len(rows):
            torch.autograd.backward(chosen, [leaf.grad for leaf in leaves])
        return total

    def _logits(self, states: Tensor) -> Tensor:
        with bfloat16_products(self._device):
            return self.drafts.head(states[None])[0].float()

    def _pairs(self, texts: Sequence[DraftedText]) -> tuple[Tensor, Tensor]:
        """What the map of the drafter's inputs is given, and full depth's states, of unit size."""
        embedded = torch.cat([normed(self.drafts.embedded(text)) for text in texts])
        before, after = (
            normed(torch.cat([self._final[_slice(text.before, ahead)] for text in texts]).to(self._device).float())
            for ahead in (0, 1)
        )
        return torch.cat([embedded, before], dim=1), after

    def _after(self, of_places: Tensor, text: DraftedText) -> Tensor:
        return of_places[_slice(text.before, 1)]


def _mask(size: int, device: torch.device) -> Tensor:
    """What the inputs of all steps see, `[rows, rows]`; a step's rows come after those before.

    The s-th guess behind a certain token sees the certain tokens up to that, the guesses between, and itself.
    """
    place = torch.arange(size, device=device)
    ahead = place[None] - place[:, None]
    sees = [
        torch.cat([ahead <= -own, *(ahead == other - own for other in range(1, OWN_STEPS))], dim=1)
        for own in range(OWN_STEPS)
    ]
    seen = torch.cat(sees)
    rows = torch.arange(len(seen), device=device)
    seen[rows, rows] = True  # rows without meaning see themselves
    return seen


def _slice(places: range, ahead: int = 0) -> slice:
    return slice(places.start + ahead, places.stop + ahead)


def _parts(texts: Sequence[DraftedText]) -> Iterator[Sequence[DraftedText]]:
    return (texts[start : start + _TEXTS_AT_ONCE] for start in range(0, len(texts), _TEXTS_AT_ONCE))
