"""Train AdaSPEED's probe for one exit layer of a frozen model: binary cross-entropy on whether drafts are accepted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.trained.probe import Probe, ProbeInfo, save_probe
from ppd_runtime.training.parts import PartRun, PartTraining, Pass
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

    chooses = True

    def new_learner(self, model: PreTrainedModel) -> Probe:
        """The probe for standardised states."""
        self.standardised = Probe(model.config.hidden_size).to(model.device)
        return self.standardised

    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """AdaSPEED's probe loss, as a mean over the tokens of some rows."""
        (hidden,), (mean, deviation) = states, self._scale
        with torch.no_grad():
            accepted = self.final_head(hidden).argmax(-1) == labels
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

    def compare(self, passes: Iterable[Pass]) -> ProbeReport:
        """The probe, and the draft's own confidence."""
        return report_probe(self.probe(), self.final_head, passes)

    def save(self, known: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write the probe's folder."""
        save_probe(known["folder"], self.probe(), ProbeInfo(**known), card)


class ProbeRun(PartRun):
    """Trains a probe and writes its folder; see `PartRun`."""

    learns = ProbeTraining
