"""LayerSkip (Elhoushi et al.), and AdaSPEED, which is LayerSkip with a rule for when to stop drafting.

Drafts come from the first layers and the model's own norm and head; verification runs the remaining layers over the
exit states that drafting left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.methods.early_exit import EarlyExitDrafting, EarlyExitSettings, check_exit_layer
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.stage.layer_range import LayerRange


class LayerSkip(EarlyExitDrafting):
    """Drafts through the shared norm and head."""

    def exit_logits(self, states: Sequence[Tensor]) -> Tensor:
        """The shared norm and head over the newest exit state."""
        return self.stage.logits(states[-1])


@dataclass(frozen=True)
class LayerSkipSettings(EarlyExitSettings):
    """LayerSkip: every draft of one length."""

    def prepare(self, info: ModelInfo) -> Callable[[LayerRange], LayerSkip]:
        """Implements `MethodSettings.prepare`."""
        stopping = self.rule
        asked, load_probe = self.prepare_probe(info)
        exit_layer = check_exit_layer(asked, info)
        return lambda stage: LayerSkip(stage, exit_layer, stopping, load_probe(stage))


@dataclass(frozen=True)
class AdaSpeedSettings(LayerSkipSettings):
    """AdaSPEED: LayerSkip's drafts, as long as the product of the draft's probabilities is above the threshold."""

    stopping: str = "product"
    num_speculations: int = 12
    adaptive: bool = True
