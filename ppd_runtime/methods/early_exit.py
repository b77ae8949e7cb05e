"""Drafting with the first layers: what LayerSkip, AdaSPEED and Kangaroo share.

The first layers run once for each token, drafted or not: their entries and the exit layer's hidden states are kept, and
verification runs the later layers alone over them (LayerSkip's cache of keys, values and exit queries).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.methods.fused_drafting import GreedyChains
from ppd_runtime.methods.speculation import Propose
from ppd_runtime.methods.stopping import Adaptation, StopDrafting, Stopping
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.parts import shipped_part
from ppd_runtime.models.trained.probe import Probe, describe_probe, load_probe
from ppd_runtime.settings.checks import check_depth, check_int


class EarlyExitDrafting(ABC):
    """Drafts chains after layer `exit_layer` (counted from 1) of a stage that holds the whole model.

    Args:
        stage: the whole model.
        exit_layer: drafts come from layers 1 to this one.
        stopping: when to stop drafting.
        probe: predicts from an exit state whether a draft will be accepted, in place of the draft's probability.
    """

    def __init__(self, stage: LayerRange, exit_layer: int, stopping: Stopping, probe: Probe | None = None) -> None:
        self.stage, self.exit_layer, self._stopping, self._probe = stage, exit_layer, stopping, probe
        self.stop_drafting = StopDrafting(stopping)
        self._chains = self._make_chains(probe)
        self._states: Tensor
        """`[1, tokens, hidden_size]`: the draft after the first layers."""
        self.unread: Tensor | None = None
        """`[1, tokens, hidden_size]`: exit states to read before the next draft's, if any."""

    @property
    def draft_cost(self) -> float:
        """The exit layer over the model's layers."""
        return self.exit_layer / self.stage.num_layers

    @property
    def steered_by(self) -> int:
        """Always 0: `begin` forgets what was learned."""
        return 0

    def begin(self, capacity: int) -> None:
        """Forget the last sequence, and what the threshold learned from it."""
        self.stage.begin(capacity)
        self.stage.keep_states(None)
        self.stop_drafting = StopDrafting(self._stopping)

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Run the whole model over a prompt."""
        states = self.stage.run(0, self.exit_layer, list(token_ids), 0)
        self.saw(states)
        return self.stage.run(self.exit_layer, self.stage.num_layers, states, 0)

    def draft(self, history: Sequence[int], most: int, propose: Propose) -> Draft:
        """A chain; its last token runs through the first layers too, for the token after it."""
        draft = Draft(history[-1])
        if self._chains.possible and propose.takes_highest_logit:
            rule, unread = self.stop_drafting.rule(most), self.unread
            chain = self._chains.draft(history[-1], len(history) - 1, rule, unread)
            self._states = chain.states
            if chain.tokens:
                self.unread = None
            draft.add_chain(chain)
            return draft
        text, states = list(history), [self._run_first_layers(history[-1], len(history) - 1)]
        self.stop_drafting.begin_draft(most)
        while self.stop_drafting.wants_more():
            (proposal,) = propose(self.exit_logits(states), text, 1)
            draft.add(proposal, len(draft.tokens) - 1)
            draft.steps += 1
            self.stop_drafting.drafted(self._confidence(proposal, states[-1]))
            states.append(self._run_first_layers(proposal.token, len(text)))
            text.append(proposal.token)
        self._states = torch.cat(states, dim=1) if len(states) > 1 else states[0]
        return draft

    def verify(self, draft: Draft, position: int) -> Tensor:
        """Run the later layers, over all tokens of the draft at once."""
        return self.stage.run(self.exit_layer, self.stage.num_layers, self._states, position)

    def keep(self, draft: Draft, path: Sequence[int], history: Sequence[int]) -> None:
        """Drop entries of tokens after the path."""
        self.stage.truncate(len(history) - 1)
        self.stop_drafting.judged(draft.steps, len(path) - 1)

    @abstractmethod
    def exit_logits(self, states: Sequence[Tensor]) -> Tensor:
        """`[vocab_size]` logits for the newest token from a draft's exit states, `[1, 1, hidden_size]` each."""

    def _make_chains(self, probe: Probe | None) -> GreedyChains:
        return GreedyChains(self.stage, self.exit_layer, probe=probe)

    def saw(self, states: Tensor) -> None:  # noqa: B027 (most have no use for them)
        """Take a prompt's exit states, `[1, tokens, hidden_size]`."""

    def _confidence(self, proposal: Proposal, state: Tensor) -> float:
        return proposal.confidence if self._probe is None else float(self._probe(state[0, -1]))

    def _run_first_layers(self, token: int, position: int) -> Tensor:
        return self.stage.run(0, self.exit_layer, [token], position)


@dataclass(frozen=True)
class EarlyExitSettings:
    """The methods' settings: where to exit, and when to stop drafting (AdaSPEED's rules, for all of them)."""

    pass_kinds: ClassVar = (PassKind.ONE, PassKind.SEVERAL)
    exit_layer: int | None = None
    """Drafts come from layers 1 to this one; None is a trained part's, or a third of the depth."""
    stopping: str = "constant"
    """constant, confidence (Draft & Verify's), product (AdaSPEED's) or probe (of a trained probe's predictions)."""
    num_speculations: int = 3
    """Tokens in a draft at the most."""
    threshold: float = 0.8
    """gamma_0: drafting ends behind the token at which the confidence falls below it."""
    adaptive: bool = False
    """Whether the threshold follows the acceptance rate."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    """How the threshold follows the acceptance rate."""
    probe: str | Path | None = None
    """A folder that `ppd train probe` wrote; None is the demo model's own, for that model."""

    @property
    def rule(self) -> Stopping:
        """The stopping rule; ValueError for an unknown one."""
        adaptation = self.adaptation if self.adaptive else None
        return Stopping(self.stopping, self.num_speculations, self.threshold, adaptation)

    def prepare_probe(self, info: ModelInfo) -> tuple[int | None, Callable[[LayerRange], Probe | None]]:
        """The exit layer of the probe or else of the settings, and a loader of the probe, if the rule needs one.

        Raises:
            ValueError: if there is no such probe, or it is for another model or layer.
        """
        if self.stopping != "probe":
            if self.probe is not None:
                raise ValueError(f"probe={str(self.probe)!r} has no use with stopping={self.stopping!r}: choose probe")
            return self.exit_layer, lambda stage: None
        folder = self.probe or shipped_part(info, "probe", "stopping='probe'", "ppd train probe")
        probe = describe_probe(folder, info)
        if self.exit_layer is not None:
            probe.check_layers([self.exit_layer])
        return probe.exit_layer, lambda stage: load_probe(probe, stage.model)


def check_exit_layer(exit_layer: int | None, info: ModelInfo) -> int:
    """The exit layer, a third of the depth for None; ValueError if the model has no such exit."""
    num_layers = info.num_layers
    check_depth(num_layers, "an early exit", info.name)
    if exit_layer is None:
        return max(1, num_layers // 3)
    check_int("exit_layer", exit_layer)
    if not 1 <= exit_layer < num_layers:
        raise ValueError(f"exit_layer={exit_layer}: with {num_layers} layers choose 1 to {num_layers - 1}")
    return exit_layer
