"""Train Kangaroo's adapter after a shallow exit of a frozen model: cross-entropy to full depth's distribution."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import check_leaving_out, describe
from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.models.trained.adapter import AdapterInfo, new_adapter, save_adapter
from ppd_runtime.training.head_comparison import HeadComparison, compare_heads
from ppd_runtime.training.loop import FrozenModel, LearningFromModel, distillation_loss
from ppd_runtime.training.recipe import ExitRecipe
from ppd_runtime.training.run import PartRun


@dataclass(frozen=True, kw_only=True)
class AdapterRecipe(ExitRecipe):
    """Everything that decides an adapter's weights, apart from model, data and rounding.

    Ten epochs of AdamW are the Kangaroo paper's (section 4.1); it names neither learning rate nor batch: these are
    ours.
    """

    learning_rate: float = 1e-3
    batch_size: int = 8
    max_length: int = 512
    epochs: int = 10


class AdapterTraining(LearningFromModel):
    """Trains a new adapter of `model` on `rows` of token ids, `[rows, length + 1]`; head and model stay as they are."""

    def __init__(self, recipe: AdapterRecipe, model: PreTrainedModel, rows: Tensor) -> None:
        frozen = FrozenModel(model, recipe.exit_layer)
        self.adapter = new_adapter(model, recipe.exit_layer)
        super().__init__(recipe, frozen, self.adapter.model, rows)
        self._attention, self._head = layer_range(self.adapter, 0, 1), FinalHead(self.adapter)

    def logits(self, states: Tensor) -> Tensor:
        """Adapter logits, `[rows, tokens, vocab_size]`, of states after the exit layer."""
        with self.autocast(states.device):
            return self._head(self._attention(inputs_embeds=states, use_cache=False).last_hidden_state)

    def loss(self, rows: Tensor) -> Tensor:
        """Equation 3 of the Kangaroo paper, as a mean over the tokens of some rows."""
        states = self.frozen.exit_states(rows[:, :-1])
        return distillation_loss(self.logits(states), self.frozen.final_logits(states))


class AdapterRun(PartRun):
    """Trains an adapter and writes its folder; see `PartRun`."""

    training: AdapterTraining

    def __init__(
        self, model: str, data: str, recipe: AdapterRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        self.recipe = recipe
        check_leaving_out(describe(model), "an adapter, which is a layer without its MLP,")
        super().__init__(model, data, recipe, out, dtype, device)

    def new_training(self, frozen: PreTrainedModel) -> AdapterTraining:
        """The training of a new adapter of `frozen`."""
        return AdapterTraining(self.recipe, frozen, self.rows)

    @property
    def learner(self) -> nn.Module:
        """The adapter without the shared head."""
        return self.training.adapter.model

    def write(self, on_row: Callable[[int], None]) -> HeadComparison:
        """Compare with the bare exit on held-out text and write the adapter's folder; `on_row` counts the rows."""
        passes = self.held_out_passes(on_row)
        comparison = compare_heads(self.training.frozen.head, self.training.logits, passes, seed=self.recipe.seed)
        card = self.account() | {"held_out": comparison.as_dict()}
        save_adapter(self.out, self.training.adapter, AdapterInfo(**self.known()), card)
        return comparison
