"""The loop of every training: steps of AdamW, kept in a checkpoint."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.recipe import Recipe


class Training(ABC):
    """Takes steps of AdamW; a subclass knows the gradients and the learning rate of each.

    Args:
        network: what learns; parameters that need no gradient stay as they are.
        num_steps: steps at the most.
        weight_decay: AdamW's.
    """

    def __init__(self, network: nn.Module, num_steps: int, weight_decay: float = 0.0) -> None:
        self.network, self.num_steps = network, num_steps
        self.optimizer = torch.optim.AdamW(network.parameters(), weight_decay=weight_decay)
        self.steps = 0
        """Steps taken."""

    def begin(self) -> None:  # noqa: B027
        """Before the first step of all: set what can be computed without steps."""

    @abstractmethod
    def add_gradients(self, step: int) -> float:
        """Add the gradients of a step's mean loss to the parameters'; gives the loss."""

    @abstractmethod
    def learning_rate(self) -> float:
        """The next step's."""

    def goes_on(self) -> bool:
        """Whether another step is to be taken."""
        return self.steps < self.num_steps

    def step(self) -> float:
        """Take a step; gives its mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad()
        loss = self.add_gradients(self.steps)
        self.optimizer.step()
        self.steps += 1
        return loss

    def take_steps(
        self, checkpoint: Checkpoint, on_step: Callable[[int, float], None], save_every_s: float = 20.0
    ) -> None:
        """Take the steps that are left; `on_step` gets the number of finished steps and the last one's mean loss."""
        self.steps, saved = checkpoint.load(), time.monotonic()
        if not self.steps:
            self.begin()
        going_on = self.goes_on()
        while going_on:
            loss = self.step()
            going_on = self.goes_on()
            if not going_on or time.monotonic() - saved >= save_every_s:
                checkpoint.save(self.steps)
                saved = time.monotonic()
            on_step(self.steps, loss)


class RecipeTraining(Training):
    """Takes a recipe's steps over `rows` of token ids, `[rows, length + 1]`."""

    def __init__(self, recipe: Recipe, network: nn.Module, rows: Tensor) -> None:
        super().__init__(network, recipe.num_steps(len(rows)), recipe.weight_decay)
        self.rows, self._schedule = rows, recipe

    def learning_rate(self) -> float:
        """The next step's."""
        return self._schedule.learning_rate_at(self.steps, self.num_steps)

    def batch(self, step: int) -> np.ndarray:
        """The numbers of a step's rows."""
        return self._schedule.batch(step, len(self.rows))

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps together."""
        return sum(len(self.batch(step)) for step in range(self.num_steps)) * (self.rows.shape[1] - 1)
