"""Train an exit head for one layer of a frozen model: the paper's recipe (Table 4), or full depth's own distribution.

Only the head learns. Its inputs are the hidden states after the exit layer, from teacher-forced passes over the data.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.models.trained.heads import KINDS, LM_HEAD, HeadInfo, HeadNetwork, new_head, save_head
from ppd_runtime.training.head_comparison import HeadComparison, compare_heads
from ppd_runtime.training.parts import PartRun, PartTraining, Pass
from ppd_runtime.training.recipe import ExitRecipe

CROSS_ENTROPY, DISTIL = "cross-entropy", "distil"
LOSSES = (CROSS_ENTROPY, DISTIL)
PAPER, QUICK = "paper", "quick"
RECIPES = (PAPER, QUICK)


@dataclass(frozen=True, kw_only=True)
class HeadRecipe(ExitRecipe):
    """Everything that decides a head's weights, apart from model, data and rounding; the defaults are Table 4's.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    kind: str = LM_HEAD
    loss: str = CROSS_ENTROPY
    """cross-entropy to the text's next token (Table 4), or distil: to full depth's distribution over it."""

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("loss", LOSSES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        super().__post_init__()


def recipe_for(exit_layer: int, kind: str, recipe: str | None = None, **changes: Any) -> HeadRecipe:
    """One of `RECIPES` with changes to it; None leaves a value as it is.

    The paper's is Table 4's, for a model of 13 billion parameters on eight GPUs. The quick one is ours, for a model
    like the demo's on two CPU cores: it learns full depth's distribution in a few minutes. None takes the paper's for
    lm-head, and the quick one for the other kinds, which the paper does not have.
    """
    recipe = recipe or (PAPER if kind == LM_HEAD else QUICK)
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: choose one of {', '.join(RECIPES)}")
    quick = {
        "loss": DISTIL,
        "learning_rate": 2e-3,
        "batch_size": 8,
        "max_length": 512,
        "epochs": 1,
        "max_steps": 200,
    }
    own: dict[str, Any] = quick if recipe == QUICK else {}
    given = {name: value for name, value in changes.items() if value is not None}
    return HeadRecipe(exit_layer=exit_layer, kind=kind, **own | given)


class HeadTraining(PartTraining):
    """Trains a new head on `rows` of token ids, `[rows, length + 1]`."""

    recipe: HeadRecipe

    def new_learner(self, model: PreTrainedModel) -> HeadNetwork:
        """The head."""
        self.full_depth = self.recipe.loss == DISTIL
        self.head = new_head(self.recipe.kind, model).float()
        return self.head

    def logits(self, states: Tensor) -> Tensor:
        """Its logits, `[rows, tokens, vocab_size]`."""
        with self.autocast():
            return self.head(states)

    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean loss of some rows' tokens."""
        logits = self.logits(states[0])
        if self.recipe.loss == DISTIL:
            return self.distillation_loss(logits, states[1])
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def compare(self, passes: Iterable[Pass]) -> HeadComparison:
        """The model's own head, and this one as it will be saved."""
        HeadInfo.round_as_stored(self.head)
        return compare_heads(self.final_head, self.logits, passes, seed=self.recipe.seed)

    def save(self, known: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write the head's folder."""
        save_head(known["folder"], self.head, HeadInfo(**known, kind=self.recipe.kind), card)


class ExitHeadRun(PartRun):
    """Trains a head and writes its folder; see `PartRun`."""

    learns = HeadTraining
