"""One training of an exit head, from a model's name and a file of texts to the head's folder."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from ppd_runtime.models.trained.heads import HeadInfo, HeadNetwork, new_head, save_head
from ppd_runtime.training.exit_head import HeadRecipe, HeadTraining
from ppd_runtime.training.head_comparison import HeadComparison, compare_heads
from ppd_runtime.training.run import PartRun


class ExitHeadRun(PartRun):
    """Trains a head and writes its folder; see `PartRun`."""

    training: HeadTraining

    def __init__(
        self, model: str, data: str, recipe: HeadRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        self.recipe = recipe
        super().__init__(model, data, recipe, out, dtype, device)

    def new_training(self, frozen: PreTrainedModel) -> HeadTraining:
        """The training of a new head of `frozen`."""
        return HeadTraining(self.recipe, frozen, new_head(self.recipe.kind, frozen).float(), self.rows)

    @property
    def learner(self) -> HeadNetwork:
        """The head."""
        return self.training.head

    def write(self, on_row: Callable[[int], None]) -> HeadComparison:
        """Compare the head with the shared one on held-out text and write its folder; `on_row` counts the rows."""
        passes = self.held_out_passes(on_row)
        comparison = compare_heads(self.training.frozen.head, self.training.logits, passes, seed=self.recipe.seed)
        head = HeadInfo(**self.known(), kind=self.recipe.kind)
        save_head(self.out, self.learner, head, self.account() | {"held_out": comparison.as_dict()})
        return comparison
