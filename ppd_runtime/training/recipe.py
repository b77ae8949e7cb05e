"""What every recipe has: its steps over rows of text, and the learning rate at each."""

import math
from dataclasses import dataclass

import numpy as np

from ppd_runtime.settings.checks import check_number, check_share, check_whole


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW over shuffled rows; the defaults are those of Table 4 of the pipelined decoding paper.

    Table 4 names no schedule beyond its warm-up: a cosine to zero follows it, as in the code that Vicuna was trained
    with.

    Raises:
        ValueError: naming the value and the allowed range.
    """

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
        for name in ("batch_size", "max_length", "epochs"):
            check_whole(name, getattr(self, name), 1)
        if self.max_steps is not None:
            check_whole("max_steps", self.max_steps, 1)
        check_whole("seed", self.seed, 0)
        check_number("learning_rate", self.learning_rate)
        check_number("weight_decay", self.weight_decay)
        check_share("warmup_ratio", self.warmup_ratio)

    def num_steps(self, num_rows: int) -> int:
        """Steps for `num_rows` rows."""
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


@dataclass(frozen=True, kw_only=True)
class ExitRecipe(Recipe):
    """A recipe for something that works on the hidden states after one layer."""

    exit_layer: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("exit_layer", self.exit_layer, 1)
