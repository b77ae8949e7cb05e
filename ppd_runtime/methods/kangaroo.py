"""Kangaroo (Liu et al.): drafts from a shallow exit through a trained adapter; double early exit.

The first exit is the shallow one; the second ends drafting at the first token whose confidence is not above η.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.methods.drafts import Draft
from ppd_runtime.methods.early_exit import EarlyExitDrafting, EarlyExitSettings
from ppd_runtime.methods.fused_drafting import GreedyChains
from ppd_runtime.methods.stopping import Stopping
from ppd_runtime.models.checkpoint.description import ModelInfo, check_entries_alone
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.adapter import describe_adapter, load_adapter
from ppd_runtime.models.trained.parts import shipped_part
from ppd_runtime.models.trained.probe import Probe


class Kangaroo(EarlyExitDrafting):
    """Drafts through an adapter, whose own cache follows the text.

    Each exit state is computed once. The last drafted token's, which the adapter did not read, is kept for the next
    draft if its token stays.

    Args:
        stage: the whole model.
        adapter: a model of one layer, from `load_adapter`.
        exit_layer: the layer whose states it was trained for.
        stopping: when to stop drafting.
        probe: see `EarlyExitDrafting`.
    """

    def __init__(
        self,
        stage: LayerRange,
        adapter: PreTrainedModel,
        exit_layer: int,
        stopping: Stopping,
        probe: Probe | None = None,
    ) -> None:
        self.adapter = stage.behind(adapter)
        super().__init__(stage, exit_layer, stopping, probe)

    def begin(self, capacity: int) -> None:
        """Forget the last sequence."""
        super().begin(capacity)
        self.adapter.begin(capacity)
        self.unread = None

    def saw(self, states: Tensor) -> None:
        """The adapter reads a prompt's exit states."""
        self.adapter.run(0, 1, states, 0)

    def exit_logits(self, states: Sequence[Tensor]) -> Tensor:
        """Run the adapter and the model's head over exit states that the adapter has not read yet."""
        unread = states[-1] if self.unread is None else torch.cat([self.unread, states[-1]], dim=1)
        self.unread = None
        return self.adapter.logits(self.adapter.run(0, 1, unread, self.adapter.length(0)))

    def keep(self, draft: Draft, path: Sequence[int], history: Sequence[int]) -> None:
        """Drop entries of tokens after the path, also the adapter's."""
        super().keep(draft, path, history)
        self.adapter.truncate(len(history) - 1)
        first = len(history) - 1 - len(path)  # where node 0 stood
        read = max(self.adapter.length(0) - first, 0)
        if read < len(path):
            states = self._states[:, read : len(path)].clone()  # the next draft overwrites them
            self.unread = states if self.unread is None else torch.cat([self.unread, states], dim=1)

    def _make_chains(self, probe: Probe | None) -> GreedyChains:
        return GreedyChains(self.stage, self.exit_layer, self.adapter, probe)


@dataclass(frozen=True)
class KangarooSettings(EarlyExitSettings):
    """Kangaroo with the paper's numbers: at most 6 steps, eta = 0.6 (section 4.2)."""

    stopping: str = "confidence"
    num_speculations: int = 6
    threshold: float = 0.6
    adapter: str | Path | None = None
    """A folder of `ppd train adapter`, whose layer is the exit; None is the demo model's own, for that model."""

    def prepare(self, info: ModelInfo) -> Callable[[LayerRange], Kangaroo]:
        """Implements `MethodSettings.prepare`."""
        stopping = self.rule
        check_entries_alone(info, "kangaroo")
        folder = self.adapter or shipped_part(info, "adapter", "kangaroo", "ppd train adapter")
        adapter = describe_adapter(folder, info)
        if self.exit_layer is not None:
            adapter.check_layers([self.exit_layer])
        asked, load_probe = self.prepare_probe(info)
        if asked not in (None, adapter.exit_layer):
            raise ValueError(
                f"stopping='probe': the probe is for layer {asked}, the adapter for layer {adapter.exit_layer}; give "
                f"probe=FOLDER with one for that layer (`ppd train probe --exit-layer {adapter.exit_layer}`), or "
                "choose another stopping rule"
            )
        return lambda stage: Kangaroo(
            stage, load_adapter(adapter, stage.model), adapter.exit_layer, stopping, load_probe(stage)
        )
