"""Train Kangaroo's adapter after a shallow exit of a frozen model: cross-entropy to full depth's distribution."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo, check_leaving_out
from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.models.trained.adapter import AdapterInfo, new_adapter, save_adapter
from ppd_runtime.training.head_comparison import HeadComparison, compare_heads
from ppd_runtime.training.parts import PartRun, PartTraining, Pass
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

    recipe: AdapterRecipe
    full_depth = True

    def new_learner(self, model: PreTrainedModel) -> nn.Module:
        """The adapter without the head that it shares."""
        self.adapter = new_adapter(model, self.recipe.exit_layer)
        self._attention, self._head = layer_range(self.adapter, 0, 1), FinalHead(self.adapter)
        return self.adapter.model

    def logits(self, states: Tensor) -> Tensor:
        """Adapter logits, `[rows, tokens, vocab_size]`, of states after the exit layer."""
        with self.autocast():
            return self._head(self._attention(inputs_embeds=states, use_cache=False).last_hidden_state)

    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Equation 3 of the Kangaroo paper, as a mean over the tokens of some rows."""
        return self.distillation_loss(self.logits(states[0]), states[1])

    def compare(self, passes: Iterable[Pass]) -> HeadComparison:
        """The bare exit, and the adapter."""
        return compare_heads(self.final_head, self.logits, passes, seed=self.recipe.seed)

    def save(self, known: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write the adapter's folder."""
        save_adapter(known["folder"], self.adapter, AdapterInfo(**known), card)


class AdapterRun(PartRun):
    """Trains an adapter and writes its folder; see `PartRun`."""

    learns = AdapterTraining

    def check(self, info: ModelInfo, recipe: ExitRecipe) -> None:
        """Raise ValueError for a model without MLPs to leave out, too."""
        super().check(info, recipe)
        check_leaving_out(info, "an adapter, which is a layer without its MLP,")
