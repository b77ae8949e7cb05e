"""Train AdaSPEED's probe for one exit layer of a frozen model: binary cross-entropy on whether drafts are accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.probe import Probe, ProbeInfo, save_probe
from ppd_runtime.training.parts import PartRun, PartTraining
from ppd_runtime.training.probe_report import ProbeReport, report_probe
from ppd_runtime.training.recipe import ExitRecipe


@dataclass(frozen=True, kw_only=True)
class ProbeRecipe(ExitRecipe):
    """Everything that decides a probe's weights, apart from model, data and rounding.

    500 batches of 4 texts are the AdaSPEED paper's (section III); it names no learning rate: this one is ours.
    """

    learning_rate: float = 1e-2
    batch_size: int = 4
    max_length: int = 512
    epochs: int = 1
    max_steps: int | None = 500


class ProbeTraining(PartTraining):
    """Trains a probe on the greedy drafts of one exit over `rows` of token ids, `[rows, length + 1]`.

    It learns on states shifted and scaled to mean 0 and deviation 1 by the first batch's values: some features of a
    residual stream are a thousand times larger than others. `probe` converts it to the states themselves.
    """

    def __init__(self, recipe: ProbeRecipe, stage: LayerRange, rows: Tensor) -> None:
        self.standardised = Probe(stage.model.config.hidden_size).to(stage.device)
        super().__init__(recipe, stage, self.standardised, rows, chooses=True)

    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """AdaSPEED's probe loss, as a mean over the tokens of some rows."""
        (hidden,), (mean, deviation) = states, self._scale
        with torch.no_grad():
            accepted = self.head(hidden).argmax(-1) == labels
        log_odds = self.standardised.log_odds((hidden.float() - mean) / deviation)
        return F.binary_cross_entropy_with_logits(log_odds, accepted.float())

    @torch.no_grad()
    def probe(self) -> Probe:
        """The probe as it is now, for the model's own hidden states."""
        mean, deviation = self._scale
        probe = Probe(len(mean)).to(mean.device)
        probe.direction.copy_(self.standardised.direction / deviation)
        probe.bias.copy_(self.standardised.bias - probe.direction @ mean)
        return probe

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """The first batch's mean and deviation, `[hidden_size]` each."""
        (first,), _ = self.read(self.batch(0))
        return first.float().mean((0, 1)), first.float().std((0, 1)).clamp(min=1e-6)


class ProbeRun(PartRun):
    """Trains a probe and writes its folder; see `PartRun`."""

    training: ProbeTraining
    recipe: ProbeRecipe

    def new_training(self) -> ProbeTraining:
        """The training of a new probe."""
        return ProbeTraining(self.recipe, self.stage, self.rows)

    def write(self, on_row: Callable[[int], None]) -> ProbeReport:
        """Try the probe on held-out text and write its folder; `on_row` counts the rows."""
        probe = self.training.probe()
        report = report_probe(probe, self.training.head, self.held_out_passes(on_row))
        save_probe(self.out, probe, ProbeInfo(**self.known()), self.account() | {"held_out": report.as_dict()})
        return report
