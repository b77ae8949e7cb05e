"""LayerSkip (Elhoushi et al.), and AdaSPEED, which is LayerSkip with a rule for when to stop drafting.

Drafts come from the first layers and the model's own norm and head; verification runs the remaining layers over the
exit states that drafting left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ppd_runtime.decoding.drafts import Proposal
from ppd_runtime.decoding.early_exit import EarlyExitDrafting, check_exit_layer
from ppd_runtime.decoding.stopping import Adaptation, Stopping
from ppd_runtime.models.loading import ModelInfo
from ppd_runtime.models.probe import Probe, describe_probe, load_probe
from ppd_runtime.models.stage import Stage
from ppd_runtime.models.trained_parts import shipped_part


class LayerSkip(EarlyExitDrafting):
    """Drafts through the shared norm and head.

    Args:
        stage: the whole model.
        exit_layer: drafts come from layers 1 to this one.
        stopping: LayerSkip's is of constant length; AdaSPEED's the product of probabilities with an adaptation.
        probe: gives AdaSPEED's acceptance predictions in place of the draft's own probabilities.
    """

    def __init__(self, stage: Stage, exit_layer: int, stopping: Stopping, probe: Probe | None = None) -> None:
        super().__init__(stage, exit_layer, stopping)
        self._probe = probe

    def exit_logits(self, states: Sequence[Tensor]) -> Tensor:
        """The shared norm and head over the newest exit state."""
        return self.stage.logits(states[-1])

    def confidence(self, proposal: Proposal, state: Tensor) -> float:
        """The draft's probability of the token, or the probe's of its being accepted."""
        return proposal.confidence if self._probe is None else float(self._probe(state[0, -1]))


@dataclass(frozen=True)
class LayerSkipSettings:
    """LayerSkip: every draft of one length."""

    exit_layer: int | None = None
    """Drafts come from layers 1 to this one; None is a third of the depth."""
    num_speculations: int = 3
    """Tokens in a draft."""

    def prepare(self, info: ModelInfo) -> Callable[[Stage], LayerSkip]:
        """As `MethodSettings.prepare`."""
        exit_layer = _exit_layer(self.exit_layer, info)
        stopping = Stopping(most=self.num_speculations)
        return lambda stage: LayerSkip(stage, exit_layer, stopping)


@dataclass(frozen=True)
class AdaSpeedSettings:
    """AdaSPEED, and Draft & Verify's rule (`stopping="confidence"`), over LayerSkip's drafts."""

    exit_layer: int | None = None
    """Drafts come from layers 1 to this one; None is the probe's, or a third of the depth."""
    stopping: str = "product"
    """product, confidence, constant, or probe: the product of the probe's predictions."""
    num_speculations: int = 12
    """Tokens in a draft at the most."""
    threshold: float = 0.8
    """gamma_0: where the threshold begins."""
    adaptive: bool = True
    """Whether the threshold follows the acceptance rate."""
    adaptation: Adaptation = field(default_factory=Adaptation)
    """How it does."""
    probe: str | Path | None = None
    """A folder that `ppd train probe` wrote; None is the demo model's own, for that model."""

    def prepare(self, info: ModelInfo) -> Callable[[Stage], LayerSkip]:
        """As `MethodSettings.prepare`."""
        adaptation = self.adaptation if self.adaptive else None
        stopping = Stopping(self.stopping, self.num_speculations, self.threshold, adaptation)
        if self.stopping != "probe":
            exit_layer = _exit_layer(self.exit_layer, info)
            return lambda stage: LayerSkip(stage, exit_layer, stopping)
        folder = self.probe or shipped_part(info, "probe", "stopping='probe'", "ppd train probe")
        probe = describe_probe(folder, info)
        if self.exit_layer is not None:
            probe.check_layers([self.exit_layer])
        return lambda stage: LayerSkip(stage, probe.exit_layer, stopping, load_probe(probe, stage.model))


def default_exit_layer(num_layers: int) -> int:
    """A third of the depth, rounded down, at least 1: where drafts come from unless another layer is asked for."""
    return max(1, num_layers // 3)


def _exit_layer(exit_layer: int | None, info: ModelInfo) -> int:
    return check_exit_layer(exit_layer, info.num_layers, default_exit_layer(info.num_layers))
