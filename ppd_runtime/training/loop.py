"""A training: a recipe's steps over rows of token ids, kept in a checkpoint."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.recipe import Recipe


class Training(ABC):
    """Takes a recipe's steps over `rows` of token ids, `[rows, length + 1]`; a subclass knows the loss."""

    def __init__(self, recipe: Recipe, parameters: Iterable[nn.Parameter], rows: Tensor) -> None:
        self.rows, self._schedule = rows, recipe
        self.num_steps = recipe.num_steps(len(rows))
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)

    @abstractmethod
    def add_gradients(self, rows: Tensor, step: int) -> float:
        """Add a batch's mean-loss gradients to the parameters'; gives the loss."""

    def run(self, checkpoint: Checkpoint, on_step: Callable[[int, float], None], save_every_s: float = 30.0) -> None:
        """Take the steps that are left; `on_step` gets the number of finished steps and the last one's mean loss."""
        first, saved = checkpoint.load(), time.monotonic()
        for step in range(first, self.num_steps):
            loss = self._step(step)
            if time.monotonic() - saved >= save_every_s or step + 1 == self.num_steps:
                checkpoint.save(step + 1)
                saved = time.monotonic()
            on_step(step + 1, loss)

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps together."""
        batches = (self._schedule.batch(step, len(self.rows)) for step in range(self.num_steps))
        return sum(map(len, batches)) * (self.rows.shape[1] - 1)

    def _step(self, step: int) -> float:
        self.optimizer.param_groups[0]["lr"] = self._schedule.learning_rate_at(step, self.num_steps)
        self.optimizer.zero_grad()
        loss = self.add_gradients(self.rows[self._schedule.batch(step, len(self.rows))], step)
        self.optimizer.step()
        return loss


class FrozenModel:
    """A model that only teaches, cut at the exit layer."""

    def __init__(self, model: PreTrainedModel, exit_layer: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self._below = layer_range(model, 0, exit_layer)
        self._above = layer_range(model, exit_layer, model.config.num_hidden_layers)
        self.head = FinalHead(model)

    @torch.no_grad()
    def exit_states(self, input_ids: Tensor) -> Tensor:
        """Hidden states after the exit layer, `[rows, tokens, hidden_size]`, of token ids `[rows, tokens]`."""
        return self._below(input_ids=input_ids.to(self.model.device), use_cache=False).last_hidden_state

    @torch.no_grad()
    def final_logits(self, exit_states: Tensor) -> Tensor:
        """Full depth's logits, `[rows, tokens, vocab_size]` float32, from the states after the exit layer."""
        return self.head(self._above(inputs_embeds=exit_states, use_cache=False).last_hidden_state).float()


class LearningFromModel(Training):
    """A training on what a frozen model computes, a part of a batch at a time.

    Args:
        recipe: the steps.
        frozen: the model, cut where the learner takes its inputs.
        learner: what is trained.
        rows: token ids, `[rows, length + 1]`.
        logits_at_once: bounds the memory of a pass over a part of a batch.
    """

    def __init__(
        self, recipe: Recipe, frozen: FrozenModel, learner: nn.Module, rows: Tensor, logits_at_once: int = 2**24
    ) -> None:
        super().__init__(recipe, learner.parameters(), rows)
        self.frozen = frozen
        logits_of_a_row = (rows.shape[1] - 1) * frozen.model.config.vocab_size
        self._rows_at_once = max(1, logits_at_once // logits_of_a_row)

    @abstractmethod
    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss of some rows' tokens."""

    def add_gradients(self, rows: Tensor, step: int) -> float:
        """Add a batch's mean-loss gradients to the parameters'; gives the loss."""
        total = 0.0
        for part in rows.split(self._rows_at_once):
            loss = self.loss(part) * (len(part) / len(rows))
            loss.backward()
            total += float(loss.detach())
        return total

    def autocast(self, device: torch.device) -> torch.autocast:
        """A half-precision model's products are in bfloat16: in float16 the gradients of tokens would vanish."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.frozen.model.dtype != torch.float32)


def distillation_loss(logits: Tensor, final_logits: Tensor) -> Tensor:
    """Cross-entropy to full depth's distribution, mean over the tokens; both `[rows, tokens, vocab_size]`."""
    return F.cross_entropy(logits.float().flatten(0, 1), final_logits.softmax(-1).flatten(0, 1))
