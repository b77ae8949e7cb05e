"""Trains a part for one layer of a frozen model, on what the model makes of texts: it reads each of them once."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo, check_hidden_states, describe
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import FinalHead
from ppd_runtime.models.stage.state_range import range_class
from ppd_runtime.settings.checks import check_number
from ppd_runtime.training.adapt.answers import Text
from ppd_runtime.training.adapt.states import KeptStates, Reader, read_all, room
from ppd_runtime.training.loop import RecipeTraining
from ppd_runtime.training.recipe import ExitRecipe
from ppd_runtime.training.run import TrainingRun, check_out

_LOGITS_AT_ONCE = 2**24
"""Most logits of a pass over a part of a batch: bounds its memory."""
Pass = tuple[Tensor, Tensor, Tensor]
"""A text's states after the exit layer `[1, tokens, hidden_size]`, full depth's logits `[1, tokens, vocab_size]`, and
the next tokens `[tokens]`."""


class PartTraining(RecipeTraining):
    """A training on a model's states and labels for `rows`: kept ones, else the model computes them at each step.

    Args:
        recipe: the steps.
        stage: the whole model; it stays as it is.
        rows: token ids, `[rows, length + 1]`.
    """

    recipe: Any
    full_depth = False
    """Whether `loss` needs the states after the last layer too."""
    chooses = False
    """Whether labels are full depth's choices rather than the next tokens."""

    def __init__(self, recipe: ExitRecipe, stage: LayerRange, rows: Tensor) -> None:
        self.recipe = recipe
        super().__init__(recipe, self.new_learner(stage.model), rows)
        self._model, self._device = stage.model.requires_grad_(False).eval(), stage.device
        self.final_head = FinalHead(self._model)
        self._layers = (recipe.exit_layer, *[stage.num_layers] * self.full_depth)
        self._reader = Reader(stage, self._layers, self.chooses)
        self._states, self._labels = list[Tensor](), torch.empty(0)
        self._places = dict[int, slice]()  # of kept rows
        self._rows_at_once = max(1, _LOGITS_AT_ONCE // ((rows.shape[1] - 1) * self._model.config.vocab_size))

    @abstractmethod
    def new_learner(self, model: PreTrainedModel) -> nn.Module:
        """A new part of a model, before any step."""

    @abstractmethod
    def loss(self, states: Sequence[Tensor], labels: Tensor) -> Tensor:
        """Mean loss of some rows' tokens, from what `read` gives."""

    @abstractmethod
    def compare(self, passes: Iterable[Pass]) -> Any:
        """A report of what the part is worth on held-out texts."""

    @abstractmethod
    def save(self, known: Mapping[str, Any], card: Mapping[str, Any]) -> None:
        """Write the part's folder; `known` are the fields of every `PartInfo`."""

    def keep(self, folder: Path, most_bytes: float) -> Iterator[tuple[int, int]]:
        """Have the model read the rows that steps need, in their order, until its states take `most_bytes` in a folder.

        Yields the number of rows that are kept, and of those to read.
        """
        steps_of_epoch = -(-len(self.rows) // len(self.batch(0)))
        rows = np.concatenate([self.batch(step) for step in range(min(self.num_steps, steps_of_epoch))])
        kept = KeptStates(folder, self._layers, self._model.config.hidden_size, self._model.dtype)
        for done in read_all(kept, map(self._text, rows), self._reader, most_bytes):
            yield done, len(rows)
        self._states, self._labels = [kept.states(layer) for layer in self._layers], kept.choices()
        self._places = {text.source: slice(text.places.start, text.places.stop) for text in kept.texts()}

    def read(self, numbers: np.ndarray) -> tuple[list[Tensor], Tensor]:
        """Rows' states after the exit layer, and the last one if asked for, `[rows, tokens, hidden_size]`; and labels.

        The labels are `[rows, tokens]`.
        """
        states, labels = zip(*(self._row(int(number)) for number in numbers), strict=True)
        return [torch.stack(of_layer) for of_layer in zip(*states, strict=True)], torch.stack(labels)

    def add_gradients(self, step: int) -> float:
        """Add a batch's mean-loss gradients to the parameters'; gives the loss."""
        numbers, total = self.batch(step), 0.0
        for first in range(0, len(numbers), self._rows_at_once):
            part = numbers[first : first + self._rows_at_once]
            loss = self.loss(*self.read(part)) * (len(part) / len(numbers))
            loss.backward()
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def final_logits(self, states: Tensor) -> Tensor:
        """Full depth's logits, `[rows, tokens, vocab_size]` float32, from the states after the last layer."""
        return self.final_head(states).float()

    def autocast(self) -> torch.autocast:
        """A half-precision model's products are in bfloat16: in float16 the gradients of tokens would vanish."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._model.dtype != torch.float32)

    def distillation_loss(self, logits: Tensor, states: Tensor) -> Tensor:
        """Cross-entropy to full depth's distribution, mean over the tokens.

        `[rows, tokens, vocab_size]` and, after the last layer, `[rows, tokens, hidden_size]`.
        """
        return F.cross_entropy(logits.float().flatten(0, 1), self.final_logits(states).softmax(-1).flatten(0, 1))

    def _text(self, number: int) -> Text:
        return Text(int(number), tuple(self.rows[number].tolist()), 1)

    def _row(self, number: int) -> tuple[list[Tensor], Tensor]:
        if number not in self._places:
            return self._reader.read(self._text(number))
        places = self._places[number]
        states = [of_layer[places].to(self._device) for of_layer in self._states]
        return states, self._labels[places].to(self._device)


class PartRun(TrainingRun):
    """Trains a part of a model, given by its folder or name, for a new folder `out`; see `TrainingRun`.

    Args:
        dtype: float32, bfloat16, float16 or auto: the frozen model's; the part learns in float32.
        device: cpu, cuda or auto.
        disk_gb: most gigabytes of hidden states on disk meanwhile; rows beyond that are computed at each step.
    """

    training: PartTraining
    learns: type[PartTraining]
    """Its training."""

    def __init__(
        self,
        model: str,
        data: str,
        recipe: ExitRecipe,
        out: Path,
        dtype: str = "auto",
        device: str = "auto",
        disk_gb: float = 4.0,
    ) -> None:
        check_out(out)
        check_number("disk_gb", disk_gb)
        info = describe(model)
        self.check(info, recipe)
        place = choose_device(device)
        super().__init__(info, data, recipe, out)
        self._disk_gb = disk_gb
        frozen = load_layers(info, info.num_layers, choose_dtype(dtype, place, info), place)
        self.settings["dtype"] = str(frozen.dtype).removeprefix("torch.")
        self.stage = range_class(frozen.config)(frozen, longest_in_chunks=info.longest_in_chunks)
        self.training = self.learns(recipe, self.stage, self.rows)

    def check(self, info: ModelInfo, recipe: ExitRecipe) -> None:
        """Raise ValueError for a model that the part cannot be for, such as one without a layer after the exit's."""
        check_hidden_states(info, "training")
        if recipe.exit_layer >= info.num_layers:
            choice = f"with {info.num_layers} layers choose 1 to {info.num_layers - 1}"
            raise ValueError(f"exit_layer={recipe.exit_layer}: {choice}")

    def reading(self) -> Iterator[tuple[int, int]]:
        """Have the model read what the steps need, see `PartTraining.keep`."""
        return self.training.keep(self.unfinished, room(self.unfinished, self._disk_gb))

    def write(self, on_row: Callable[[int], None]) -> Any:
        """Compare on held-out text and write the part's folder; `on_row` counts the rows."""
        report = self.training.compare(self._held_out_passes(on_row))
        known = {
            "folder": self.out,
            "model": self.info.name,
            "model_fingerprint": self.settings["model_fingerprint"],
            "exit_layer": self.training.recipe.exit_layer,
            "hidden_size": self.stage.model.config.hidden_size,
            "vocab_size": self.info.vocab_size,
            "weights_sha256": "",
        }
        self.training.save(known, self.account() | {"held_out": report.as_dict()})
        return report

    def _held_out_passes(self, on_row: Callable[[int], None]) -> Iterator[Pass]:
        reader = Reader(self.stage, (self.training.recipe.exit_layer, self.stage.num_layers), chooses=False)
        for number, row in enumerate(self.held_out.tolist(), start=1):
            (states, final), labels = reader.read(Text(number, tuple(row), 1))
            yield states[None], self.training.final_logits(final[None]), labels
            on_row(number)
