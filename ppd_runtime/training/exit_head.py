"""Train an exit head for one layer of a frozen model: the paper's recipe (Table 4), or full depth's own distribution.

Only the head learns. Its inputs are the hidden states behind the exit layer, from teacher-forced passes over the data.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.cost_model.checks import check_number, check_share, check_whole
from ppd_runtime.models.stage import FinalHead, layer_range
from ppd_runtime.models.trained_heads import KINDS, LM_HEAD, HeadNetwork
from ppd_runtime.training.checkpoint import Checkpoint

CROSS_ENTROPY, DISTIL = "cross-entropy", "distil"
LOSSES = (CROSS_ENTROPY, DISTIL)
PAPER, QUICK = "paper", "quick"
RECIPES = (PAPER, QUICK)
_LOGITS_AT_ONCE = 2**24  # bounds the memory of a pass over a part of a batch


@dataclass(frozen=True)
class HeadRecipe:
    """Everything that decides a head's weights, apart from model, data and rounding; the defaults are Table 4's.

    Table 4 names no schedule beyond its warm-up: a cosine to zero follows it, as in the code that Vicuna was trained
    with.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    exit_layer: int
    kind: str = LM_HEAD
    loss: str = CROSS_ENTROPY
    """cross-entropy to the text's next token (Table 4), or distil: to full depth's distribution over it."""
    learning_rate: float = 2e-5
    """AdamW's."""
    batch_size: int = 128
    """Rows for one step."""
    max_length: int = 2048
    """Tokens in a row."""
    epochs: int = 3
    max_steps: int | None = None
    """Steps to take at the most; None: as many as the epochs have."""
    warmup_ratio: float = 0.04
    """Share of the steps."""
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("loss", LOSSES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in ("exit_layer", "batch_size", "max_length", "epochs"):
            check_whole(name, getattr(self, name), 1)
        if self.max_steps is not None:
            check_whole("max_steps", self.max_steps, 1)
        check_whole("seed", self.seed, 0)
        check_number("learning_rate", self.learning_rate)
        check_number("weight_decay", self.weight_decay)
        check_share("warmup_ratio", self.warmup_ratio)

    def num_steps(self, num_rows: int) -> int:
        """Steps for so many rows of data."""
        steps = self.epochs * math.ceil(num_rows / self.batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def batch(self, step: int, num_rows: int) -> np.ndarray:
        """Numbers of the rows of a step, from 0: a function of (seed, step) alone, each row once an epoch."""
        epoch, place = divmod(step, math.ceil(num_rows / self.batch_size))
        order = np.random.default_rng((self.seed, epoch)).permutation(num_rows)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        warmup = max(1, round(self.warmup_ratio * num_steps))
        decay = 0.5 + 0.5 * math.cos(math.pi * max(0, step + 1 - warmup) / max(1, num_steps - warmup + 1))
        return self.learning_rate * min((step + 1) / warmup, decay)


def recipe_for(exit_layer: int, kind: str, recipe: str | None = None, **changes: Any) -> HeadRecipe:
    """One of `RECIPES` with changes to it; None leaves a value as it is.

    The paper's is Table 4's, for a model of 13 billion parameters on eight GPUs. The quick one is ours, for a model
    like the demo's on two CPU cores: it learns full depth's distribution in a few minutes. None takes the paper's for
    lm-head, and the quick one for affine, which the paper does not have.
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
    return HeadRecipe(exit_layer, kind, **own | given)


class FrozenModel:
    """A model that only teaches, cut at the exit layer."""

    def __init__(self, model: PreTrainedModel, exit_layer: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self._below = layer_range(model, 0, exit_layer)
        self._above = layer_range(model, exit_layer, model.config.num_hidden_layers)
        self.head = FinalHead(model)

    @torch.no_grad()
    def exit_states(self, input_ids: Tensor) -> Tensor:
        """Hidden states behind the exit layer, `[rows, tokens, hidden_size]`, of token ids `[rows, tokens]`."""
        return self._below(input_ids=input_ids.to(self.model.device), use_cache=False).last_hidden_state

    @torch.no_grad()
    def final_logits(self, exit_states: Tensor) -> Tensor:
        """Full depth's logits, `[rows, tokens, vocab_size]` float32, from the states behind the exit layer."""
        return self.head(self._above(inputs_embeds=exit_states, use_cache=False).last_hidden_state).float()


class HeadTraining:
    """Trains `head` on `rows` of token ids, `[rows, length + 1]`, from the checkpoint's last step on."""

    def __init__(self, recipe: HeadRecipe, model: PreTrainedModel, head: HeadNetwork, rows: Tensor) -> None:
        self.recipe, self.head, self.rows = recipe, head, rows
        self.frozen = FrozenModel(model, recipe.exit_layer)
        self.num_steps = recipe.num_steps(len(rows))
        parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        logits_of_a_row = (rows.shape[1] - 1) * model.config.vocab_size
        self._rows_at_once = max(1, _LOGITS_AT_ONCE // logits_of_a_row)

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
        batches = (self.recipe.batch(step, len(self.rows)) for step in range(self.num_steps))
        return sum(map(len, batches)) * (self.rows.shape[1] - 1)

    def logits(self, states: Tensor) -> Tensor:
        """The head's, `[rows, tokens, vocab_size]`; a half-precision model's products are in bfloat16.

        In float16 the gradients of single tokens would vanish.
        """
        half = self.frozen.model.dtype != torch.float32
        with torch.autocast(states.device.type, torch.bfloat16, enabled=half):
            return self.head(states)

    def _step(self, step: int) -> float:
        rows = self.rows[self.recipe.batch(step, len(self.rows))]
        self.optimizer.param_groups[0]["lr"] = self.recipe.learning_rate_at(step, self.num_steps)
        self.optimizer.zero_grad()
        total = 0.0
        for part in rows.split(self._rows_at_once):
            loss = self._loss(part) * (len(part) / len(rows))
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total

    def _loss(self, rows: Tensor) -> Tensor:
        """Mean over the tokens of some rows."""
        states = self.frozen.exit_states(rows[:, :-1])
        if self.recipe.loss == DISTIL:
            targets = self.frozen.final_logits(states).softmax(-1).flatten(0, 1)
        else:
            targets = rows[:, 1:].flatten().to(states.device)
        return F.cross_entropy(self.logits(states).float().flatten(0, 1), targets)
