"""Affine exit heads for several layers of a model, trained side by side on kept states."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.trained.heads import AffineHead
from ppd_runtime.training.adapt.states import KeptStates
from ppd_runtime.training.adapt.work_folder import Clock, Progress, WorkFolder, in_words, write_json
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.recipe import Recipe

RECIPE = Recipe(learning_rate=1e-3, batch_size=1024, epochs=20)
"""Its batches are of places; the rate falls by a cosine over the time or the steps, whichever is over first."""
_LEAST_STEPS, _USUAL_STEPS, _WARMUP = 50, 200, 20
_SAVE_EVERY_S = 20.0
OUTSIDE = -100
"""The label of a token that the shortlist lacks."""


def labels_of(choices: Tensor, tokens: Sequence[int], vocab_size: int) -> Tensor:
    """The places of tokens in a shortlist, `OUTSIDE` for others."""
    places = torch.full((vocab_size,), OUTSIDE)
    places[torch.tensor(tokens)] = torch.arange(len(tokens))
    return places[choices]


class HeadsTraining:
    """Trains heads to name full depth's choice, by cross-entropy over a shortlist; only the affine maps learn.

    Args:
        end: the model's, from `model_end`.
        kept: states and their layers.
        labels: `[places]`, from `labels_of`.
        places: the numbers of those to learn from, whose labels are in the shortlist.
        folder: keeps an unfinished training.
        settings: JSON values that decide the result.
    """

    def __init__(
        self,
        end: PreTrainedModel,
        kept: KeptStates,
        labels: Tensor,
        places: Tensor,
        folder: WorkFolder,
        settings: Mapping[str, Any],
    ) -> None:
        self.heads = {layer: AffineHead(end) for layer in kept.layers}
        """By their layers."""
        self.network = nn.ModuleDict({str(layer): head for layer, head in self.heads.items()})
        """All of them."""
        self._states = {layer: kept.states(layer) for layer in kept.layers}
        self._labels, self._places, self._device = labels, places, end.device
        self._optimizer = torch.optim.AdamW(self.network.parameters(), weight_decay=0.0)
        self._checkpoint = Checkpoint(folder / "heads.safetensors", self.network, [self._optimizer], settings)
        self._began_file = folder / "heads-began.json"
        self.num_steps = max(RECIPE.num_steps(len(places)), _USUAL_STEPS)
        """Steps at the most."""
        self.num_places, self.hidden_size = len(places), end.config.hidden_size
        self.steps = 0
        """Steps taken."""

    def run(self, clock: Clock, share: float, progress: Progress) -> None:
        """Train until `share` of the time is over, or all steps are taken; a few are taken in any case."""
        self.steps, saved, end = self._checkpoint.load(), time.monotonic(), share * clock.seconds
        began = self._begin(clock)
        while self.steps < self.num_steps and (self.steps < _LEAST_STEPS or clock.left(share)):
            passed = (clock.spent - began) / (end - began) if end > began else 1.0
            loss = self._step(max(self.steps / self.num_steps, min(passed, 0.99)))
            self.steps += 1
            if time.monotonic() - saved >= _SAVE_EVERY_S:
                self._checkpoint.save(self.steps)
                saved = time.monotonic()
            progress(f"heads: step {self.steps}, loss {loss:.3f}, at most {in_words(clock.left(share))}")
        self._checkpoint.save(self.steps)

    def _begin(self, clock: Clock) -> float:
        """The seconds that were spent before the first step."""
        if not self._began_file.exists():
            write_json(self._began_file, clock.spent)
        return float(self._began_file.read_text())

    def _step(self, passed: float) -> float:
        """Take a step; gives the mean loss of the heads. `passed` is the share of the training that is over."""
        warmup = min(1.0, (self.steps + 1) / _WARMUP)
        for group in self._optimizer.param_groups:
            group["lr"] = RECIPE.learning_rate * warmup * (0.5 + 0.5 * math.cos(math.pi * passed))
        batch = self._places[torch.from_numpy(RECIPE.batch(self.steps, len(self._places))).sort().values]
        labels, total = self._labels[batch].to(self._device), 0.0
        self._optimizer.zero_grad()
        for layer, states in self._states.items():
            logits = self.heads[layer](states[batch].to(self._device, torch.float32)[None])[0]
            loss = F.cross_entropy(logits.float(), labels)
            loss.backward()
            total += float(loss.detach())
        self._optimizer.step()
        return total / len(self._states)
