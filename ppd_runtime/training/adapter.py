"""Train Kangaroo's adapter after a shallow exit of a frozen model: cross-entropy to full depth's distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ppd_runtime.models.checkpoint.description import ModelInfo, check_leaving_out
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.models.trained.adapter import AdapterInfo, new_adapter, save_adapter
from ppd_runtime.training.head_comparison import HeadComparison, compare_heads
from ppd_runtime.training.parts import PartRun, PartTraining
from ppd_runtime.training.recipe import ExitRecipe


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


class AdapterTraining(PartTraining):
    """Trains a new adapter on `rows` of token ids, `[rows, length + 1]`; head and model stay as they are."""

    def __init__(self, recipe: AdapterRecipe, stage: LayerRange, rows: Tensor) -> None:
        self.adapter = new_adapter(stage.model, recipe.exit_layer)
        super().__init__(recipe, stage, self.adapter.model, rows, full_depth=True)
        self._attention, self._head = layer_range(self.adapter, 0, 1), FinalHead(self.adapter)

    def logits(self, states: Tensor) -> Tensor:
        """Adapter logits, `[rows, tokens, vocab_size]`, of states after the exit layer."""
        with self.autocast():
            return self._head(self._attention(inputs_embeds=states, use_cache=False).last_hidden_state)

    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Equation 3 of the Kangaroo paper, as a mean over the tokens of some rows."""
        return self.distillation_loss(self.logits(states[0]), states[1])


class AdapterRun(PartRun):
    """Trains an adapter and writes its folder; see `PartRun`."""

    training: AdapterTraining
    recipe: AdapterRecipe

    def check(self, info: ModelInfo, recipe: ExitRecipe) -> None:
        """Raise ValueError for a model without MLPs to leave out, too."""
        super().check(info, recipe)
        check_leaving_out(info, "an adapter, which is a layer without its MLP,")

    def new_training(self) -> AdapterTraining:
        """The training of a new adapter."""
        return AdapterTraining(self.recipe, self.stage, self.rows)

    def write(self, on_row: Callable[[int], None]) -> HeadComparison:
        """Compare with the bare exit on held-out text and write the adapter's folder; `on_row` counts the rows."""
        passes = self.held_out_passes(on_row)
        comparison = compare_heads(self.training.head, self.training.logits, passes, seed=self.recipe.seed)
        card = self.account() | {"held_out": comparison.as_dict()}
        save_adapter(self.out, self.training.adapter, AdapterInfo(**self.known()), card)
        return comparison
