"""Drafting with the first layers: what LayerSkip, AdaSPEED and Kangaroo share.

The first layers run once for each token, drafted or not: their entries and the exit layer's hidden states are kept, and
verification runs the later layers alone over them (LayerSkip's cache of keys, values and exit queries).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ppd_runtime.decoding.drafts import Draft, Proposal
from ppd_runtime.decoding.speculation import Propose
from ppd_runtime.decoding.stopping import StopDrafting, Stopping
from ppd_runtime.models.stage import Stage


class EarlyExitDrafting(ABC):
    """Drafts chains behind layer `exit_layer` (counted from 1) of a stage that holds the whole model."""

    def __init__(self, stage: Stage, exit_layer: int, stopping: Stopping) -> None:
        self.stage, self.exit_layer, self._stopping = stage, exit_layer, stopping
        self.stop_drafting = StopDrafting(stopping)
        self._states: list[Tensor] = []

    @property
    def draft_cost(self) -> float:
        """The exit layer over the model's layers."""
        return self.exit_layer / self.stage.num_layers

    def begin(self, capacity: int) -> None:
        """Forget the last sequence, and what the threshold learned from it."""
        self.stage.begin(capacity)
        self.stop_drafting = StopDrafting(self._stopping)

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Run the whole model over a prompt."""
        states = self.stage.run(0, self.exit_layer, list(token_ids), 0)
        self.saw(states)
        return self.stage.run(self.exit_layer, self.stage.num_layers, states, 0)

    def draft(self, history: Sequence[int], most: int, propose: Propose) -> Draft:
        """A chain; its last token goes through the first layers too, for the token behind it."""
        draft, text = Draft(history[-1]), list(history)
        self._states = [self._run_first_layers(history[-1], len(history) - 1)]
        self.stop_drafting.begin_draft(most)
        while self.stop_drafting.wants_more():
            (proposal,) = propose(self.exit_logits(self._states), text, 1)
            draft.add(proposal, len(draft.tokens) - 1)
            draft.steps += 1
            self.stop_drafting.drafted(self.confidence(proposal, self._states[-1]))
            self._states.append(self._run_first_layers(proposal.token, len(text)))
            text.append(proposal.token)
        return draft

    def verify(self, draft: Draft, position: int) -> Tensor:
        """Run the later layers, over all tokens of the draft at once."""
        states = torch.cat(self._states, dim=1) if len(self._states) > 1 else self._states[0]
        return self.stage.run(self.exit_layer, self.stage.num_layers, states, position)

    def keep(self, draft: Draft, path: Sequence[int], history: Sequence[int]) -> None:
        """Drop the entries of the tokens behind the path's."""
        self.stage.truncate(len(history) - 1)
        self._states = self._states[: len(path)]
        self.stop_drafting.judged(draft.steps, len(path) - 1)

    @abstractmethod
    def exit_logits(self, states: Sequence[Tensor]) -> Tensor:
        """`[vocab_size]` logits for the newest token from the exit states, `[1, 1, hidden_size]` each, of a draft."""

    def confidence(self, proposal: Proposal, state: Tensor) -> float:
        """How sure the draft is of a token that was proposed from an exit state."""
        return proposal.confidence

    def saw(self, states: Tensor) -> None:  # noqa: B027 (most have no use for them)
        """The exit states of a prompt, `[1, tokens, hidden_size]`, were run."""

    def _run_first_layers(self, token: int, position: int) -> Tensor:
        return self.stage.run(0, self.exit_layer, [token], position)


def check_exit_layer(exit_layer: int | None, num_layers: int, default: int) -> int:
    """The exit layer, `default` where None is asked for; raises ValueError where the model has no such exit."""
    if num_layers < 2:
        raise ValueError(f"the model has {num_layers} layer: an early exit needs at least 2")
    if exit_layer is None:
        return default
    if isinstance(exit_layer, bool) or not isinstance(exit_layer, int):
        raise ValueError(f"exit_layer={exit_layer!r}: give a whole number")
    if not 1 <= exit_layer < num_layers:
        raise ValueError(f"exit_layer={exit_layer}: with {num_layers} layers choose 1 to {num_layers - 1}")
    return exit_layer
