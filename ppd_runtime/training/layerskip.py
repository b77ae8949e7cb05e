"""LayerSkip's training recipe: samples leave out layers, and exits through the shared norm and head learn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.slicing import FinalHead, layer_range
from ppd_runtime.settings.checks import check_number, check_share, check_whole
from ppd_runtime.training.layerskip_schedules import (
    CONSTANT,
    EXIT_CURRICULA,
    EXPONENTIAL,
    ROTATIONAL,
    TIME_CURRICULA,
    dropout_rates,
    exit_weights,
    gradual_exits,
    rotational_exits,
)
from ppd_runtime.training.loop import RecipeTraining
from ppd_runtime.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class LayerSkipRecipe(Recipe):
    """Everything that decides the weights, apart from the model to begin with, data and rounding.

    The defaults are the paper's for the continued pretraining of Llama2 7B (section 5, tables 8 and 9) on one device;
    `recipe_for` has those for training from scratch.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    from_scratch: bool = False
    """Whether to begin with new weights, drawn by `seed`."""
    max_dropout: float = 0.1
    """p_max: how likely a sample leaves out the last layer, at the most."""
    dropout_curriculum: str = CONSTANT
    """S(t)."""
    e_scale: float = 0.2
    """The early exits' share of the loss, 0 to 1."""
    exit_curriculum: str = ROTATIONAL
    """C(t, l)."""
    rotation: int = 8
    """R, for the rotational curriculum: every R-th layer's exit learns in a step."""
    clip_norm: float = 1.0
    """Longer gradients are cut to this length; the paper names none."""
    learning_rate: float = 3e-5
    batch_size: int = 4
    epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("dropout_curriculum", TIME_CURRICULA), ("exit_curriculum", EXIT_CURRICULA)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name in ("max_dropout", "e_scale"):
            check_share(name, getattr(self, name))
        check_whole("rotation", self.rotation, 1)
        check_number("clip_norm", self.clip_norm)

    def exit_weights(self, step: int, num_layers: int, num_steps: int) -> np.ndarray:
        """ẽ(t, l), `[L]`: each exit's share of a step's loss."""
        if self.exit_curriculum == ROTATIONAL:
            return exit_weights(rotational_exits(step, num_layers, self.rotation), self.e_scale)
        return exit_weights(gradual_exits(step, num_layers, num_steps), self.e_scale)

    def kept(self, step: int, num_layers: int, num_steps: int, num_rows: int) -> np.ndarray:
        """M, `[L, rows]` bools: which samples of a step's batch each layer sees; a function of (seed, step) alone."""
        rates = dropout_rates(self.max_dropout, self.dropout_curriculum, step, num_layers, num_steps)
        return np.random.default_rng((self.seed, step, 1)).random((num_layers, num_rows)) >= rates[:, None]


def recipe_for(from_scratch: bool, **changes: Any) -> LayerSkipRecipe:
    """The paper's recipe for a trained model or a new one, with changes to it; None leaves a value as it is."""
    own: dict[str, Any] = {"dropout_curriculum": EXPONENTIAL, "learning_rate": 8e-4} if from_scratch else {}
    given = {name: value for name, value in changes.items() if value is not None}
    return LayerSkipRecipe(from_scratch=from_scratch, **own | given)


class DroppableLayer(nn.Module):
    """A decoder layer that some samples of a batch leave out: they do not enter it, so they cost nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.kept = torch.ones(0, dtype=torch.bool)
        """`[rows]`: which samples of the next pass the layer sees."""
        self.output = torch.zeros(0)
        """The hidden states after the layer in the last pass, `[rows, tokens, hidden_size]`."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """Equation 1; `others` are what the library's model gives to its layers."""
        if self.kept.all():
            self.output = self.layer(hidden_states, **others)
        elif self.kept.any():
            rows = self.kept.nonzero()[:, 0].to(hidden_states.device)
            own = {name: _of_rows(value, rows, len(hidden_states)) for name, value in others.items()}
            seen = self.layer(hidden_states[rows], **own)
            self.output = hidden_states.index_copy(0, rows, seen.to(hidden_states.dtype))
        else:
            self.output = hidden_states
        return self.output


def _of_rows(value: Any, rows: Tensor, batch: int) -> Any:
    """A layer's argument for some samples of a batch; one without a row per sample is for all."""
    if isinstance(value, tuple):
        return tuple(_of_rows(each, rows, batch) for each in value)
    return value[rows] if isinstance(value, Tensor) and len(value) == batch else value


class LayerSkipTraining(RecipeTraining):
    """Trains `model` on `rows` of token ids, `[rows, length + 1]`.

    Args:
        recipe: how.
        model: in float32; all of it learns.
        rows: what on.
        half: whether products are in bfloat16.
        logits_at_once: bounds the memory that an exit's logits take; there are never two exits' at a time.
    """

    def __init__(
        self,
        recipe: LayerSkipRecipe,
        model: PreTrainedModel,
        rows: Tensor,
        half: bool = False,
        logits_at_once: int = 2**24,
    ) -> None:
        super().__init__(recipe, model.requires_grad_(True), rows)
        self.recipe, self.model, self._half = recipe, model, half
        self.num_layers: int = model.config.num_hidden_layers
        self._tokens_at_once = max(1, logits_at_once // model.config.vocab_size)
        self._decoder, self._head = layer_range(model, 0, self.num_layers), FinalHead(model)
        self.layers = [DroppableLayer(layer) for layer in model.model.layers]
        self._decoder.layers = nn.ModuleList(self.layers)

    def add_gradients(self, step: int) -> float:
        """Add the gradients of J(X, Y, t) (equation 5), clipped to length `clip_norm`; returns the loss."""
        rows = self.rows[self.batch(step)].to(self.model.device)
        outputs = self._exits(rows[:, :-1], step)
        weights = self.recipe.exit_weights(step, self.num_layers, self.num_steps)
        exits = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight]
        losses, gradients = zip(*(self._exit(output, rows[:, 1:], weight) for output, weight in exits), strict=True)
        torch.autograd.backward([output for output, _ in exits], gradients)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        return sum(losses)

    def _exits(self, input_ids: Tensor, step: int) -> Sequence[Tensor]:
        """The hidden states after each layer, some samples of each left out."""
        kept = torch.from_numpy(self.recipe.kept(step, self.num_layers, self.num_steps, len(input_ids)))
        for layer, rows in zip(self.layers, kept, strict=True):
            layer.kept = rows
        with self._autocast():
            self._decoder(input_ids=input_ids, use_cache=False)
        outputs = [layer.output for layer in self.layers]
        for layer in self.layers:
            layer.output = torch.zeros(0)  # or the graph would live on until the next step
        return outputs

    def _exit(self, output: Tensor, labels: Tensor, weight: float) -> tuple[float, Tensor]:
        """One exit's part of the loss, and its gradient for the states; norm and head get theirs at once."""
        states = [part.requires_grad_() for part in output.detach().flatten(0, 1).split(self._tokens_at_once)]
        total = 0.0
        for part, targets in zip(states, labels.flatten().split(self._tokens_at_once), strict=True):
            with self._autocast():
                logits = self._head(part[None])[0]
            loss = F.cross_entropy(logits.float(), targets, reduction="sum") * (weight / labels.numel())
            loss.backward()
            total += float(loss.detach())
        return total, torch.cat([_gradient(part) for part in states]).view_as(output)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._half)


def _gradient(tensor: Tensor) -> Tensor:
    """The last backward pass's gradient."""
    assert tensor.grad is not None
    return tensor.grad
