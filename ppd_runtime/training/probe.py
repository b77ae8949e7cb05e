"""Train AdaSPEED's probe for one exit layer of a frozen model: binary cross-entropy on whether drafts are accepted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.trained.probe import Probe, ProbeInfo, save_probe
from ppd_runtime.training.loop import FrozenModel, LearningFromModel
from ppd_runtime.training.probe_report import ProbeReport, report_probe
from ppd_runtime.training.recipe import ExitRecipe
from ppd_runtime.training.run import PartRun


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


class ProbeTraining(LearningFromModel):
    """Trains a probe on the greedy drafts of one exit of `model` over `rows` of token ids, `[rows, length + 1]`.

    It learns on states shifted and scaled to mean 0 and deviation 1 by the first batch's values: some features of a
    residual stream are a thousand times larger than others. `probe` converts it to the states themselves.
    """

    def __init__(self, recipe: ProbeRecipe, model: PreTrainedModel, rows: Tensor) -> None:
        frozen = FrozenModel(model, recipe.exit_layer)
        self.standardised = Probe(model.config.hidden_size).to(model.device)
        super().__init__(recipe, frozen, self.standardised, rows)
        first = frozen.exit_states(rows[recipe.batch(0, len(rows))][:, :-1]).float()
        self._mean, self._deviation = first.mean((0, 1)), first.std((0, 1)).clamp(min=1e-6)

    def loss(self, rows: Tensor) -> Tensor:
        """AdaSPEED's probe loss, as a mean over the tokens of some rows."""
        states = self.frozen.exit_states(rows[:, :-1])
        with torch.no_grad():
            accepted = self.frozen.head(states).argmax(-1) == self.frozen.final_logits(states).argmax(-1)
        log_odds = self.standardised.log_odds((states.float() - self._mean) / self._deviation)
        return F.binary_cross_entropy_with_logits(log_odds, accepted.float())

    @torch.no_grad()
    def probe(self) -> Probe:
        """The probe as it is now, for the model's own hidden states."""
        probe = Probe(len(self._mean)).to(self._mean.device)
        probe.direction.copy_(self.standardised.direction / self._deviation)
        probe.bias.copy_(self.standardised.bias - probe.direction @ self._mean)
        return probe


class ProbeRun(PartRun):
    """Trains a probe and writes its folder; see `PartRun`."""

    training: ProbeTraining

    def __init__(
        self, model: str, data: str, recipe: ProbeRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        self.recipe = recipe
        super().__init__(model, data, recipe, out, dtype, device)

    def new_training(self, frozen: PreTrainedModel) -> ProbeTraining:
        """The training of a new probe of `frozen`."""
        return ProbeTraining(self.recipe, frozen, self.rows)

    @property
    def learner(self) -> Probe:
        """The probe for standardised states."""
        return self.training.standardised

    def write(self, on_row: Callable[[int], None]) -> ProbeReport:
        """Try the probe on held-out text and write its folder; `on_row` counts the rows."""
        probe = self.training.probe()
        report = report_probe(probe, self.training.frozen.head, self.held_out_passes(on_row))
        save_probe(self.out, probe, ProbeInfo(**self.known()), self.account() | {"held_out": report.as_dict()})
        return report
