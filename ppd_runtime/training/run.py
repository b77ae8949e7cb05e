"""A training from a model's name and a file of texts to a folder: what all of them check, read and keep."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.checkpoint.description import ModelInfo, describe, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import choose_device, choose_dtype
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.loop import LearningFromModel, Training
from ppd_runtime.training.recipe import ExitRecipe, Recipe
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.tune.measured_on import versions

HELD_OUT_LENGTH, HELD_OUT_ROWS = 512, 64
"""Most tokens in a row, and most rows, to compare on."""


class TrainingRun(ABC):
    """Trains something and writes its folder; a run that was stopped goes on where its file beside `out` ends.

    Args:
        model: the model that it begins with.
        data: a file of texts, or "demo" for the demo model's corpus; see `read_texts`.
        recipe: what to train and how.
        out: the folder; it appears when everything is whole.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """

    training: Training
    checkpoint: Checkpoint

    def __init__(self, model: ModelInfo, data: str, recipe: Recipe, out: Path) -> None:
        if model.weights:
            raise ValueError(f"model {model.name!r} has {model.weights} weights; train the model they were made of")
        self.info, self.data, self.out, self._recipe = model, data, out, recipe
        self.rows, self.held_out, data_sha256 = self._read_rows()
        self.settings: dict[str, Any] = {
            "recipe": type(recipe).__name__,
            **asdict(recipe),
            "model_fingerprint": model_fingerprint(model),
            "data_sha256": data_sha256,
        }

    @property
    def num_held_out_rows(self) -> int:
        """Rows that `finish` compares on."""
        return len(self.held_out)

    def train(self, on_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Take the steps that are left; `on_step` gets the number of finished steps and the last one's loss.

        Raises:
            ValueError: if another process trains into the same folder, what is kept beside it is of another
                training, or nothing can be written there.
        """
        with alone(self.out):
            self.training.run(self.checkpoint, on_step)

    def finish(self, on_row: Callable[[int], None] = lambda row: None) -> Any:
        """Compare on held-out text and write the folder; `on_row` counts the rows. Raises ValueError as `train`."""
        with alone(self.out):
            report = self.write(on_row)
            self.checkpoint.discard()
        return report

    @abstractmethod
    def write(self, on_row: Callable[[int], None]) -> Any:
        """Compare on held-out text, write the folder and report."""

    def account(self) -> dict[str, Any]:
        """How it was trained, for the card."""
        return {
            **self.settings,
            "data": self.data,
            "steps": self.training.num_steps,
            "tokens": self.training.num_tokens,
            "torch_version": versions()["torch"],
        }

    def keep(self, learner: nn.Module) -> None:
        """Keep an unfinished training of `learner` beside `out`."""
        unfinished = self.out.with_name(self.out.name + ".unfinished.safetensors")
        self.checkpoint = Checkpoint(unfinished, learner, [self.training.optimizer], self.settings)

    def _read_rows(self) -> tuple[Tensor, Tensor, str]:
        """Rows for training, held-out ones, and the hash of the texts."""
        texts, tokenizer = read_texts(self.data), load_tokenizer(self.info)
        length = min(self._recipe.max_length, self.info.max_positions or self._recipe.max_length)
        held_out_length = min(length, HELD_OUT_LENGTH)
        rows = token_rows(tokenizer, texts.training, length, self.info.vocab_size)
        held_out = token_rows(tokenizer, texts.held_out, held_out_length, self.info.vocab_size)
        for name, some, needed in (("training", rows, length), ("held-out", held_out, held_out_length)):
            if not len(some):
                raise ValueError(
                    f"{self.data}: its {name} texts have no {needed + 1} tokens, which one row of max_length="
                    f"{self._recipe.max_length} needs: give more text or a smaller max_length"
                )
        every = -(-len(held_out) // HELD_OUT_ROWS)
        return rows, held_out[::every], texts.sha256


class PartRun(TrainingRun):
    """Trains a part for one layer of a frozen model.

    Args:
        model: a local folder, a hub name, or "demo".
        data: see `TrainingRun`.
        recipe: what to train and how.
        out: the part's folder.
        dtype: float32, bfloat16, float16 or auto: the frozen model's; the part learns in float32.
        device: cpu, cuda or auto.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """

    training: LearningFromModel

    def __init__(
        self, model: str, data: str, recipe: ExitRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        check_out(out)
        info = describe(model)
        check_exit_layer(info, recipe.exit_layer)
        place = choose_device(device)
        super().__init__(info, data, recipe, out)
        self.exit_layer = recipe.exit_layer
        frozen = load_layers(info, info.num_layers, choose_dtype(dtype, place, info), place)
        self.settings["dtype"] = str(frozen.dtype).removeprefix("torch.")
        self.training = self.new_training(frozen)
        self.keep(self.learner)

    @abstractmethod
    def new_training(self, frozen: PreTrainedModel) -> LearningFromModel:
        """The training of a new part of `frozen`."""

    @property
    @abstractmethod
    def learner(self) -> nn.Module:
        """What is trained; its parameters are kept and saved."""

    def known(self) -> dict[str, Any]:
        """What every part's card says; see `PartInfo`."""
        return {
            "folder": self.out,
            "model": self.info.name,
            "model_fingerprint": self.settings["model_fingerprint"],
            "exit_layer": self.exit_layer,
            "hidden_size": self.training.frozen.model.config.hidden_size,
            "vocab_size": self.info.vocab_size,
            "weights_sha256": "",
        }

    def held_out_passes(self, on_row: Callable[[int], None]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each held-out row's states after the exit layer, full depth's logits, and the next tokens.

        `[1, tokens, hidden_size]`, `[1, tokens, vocab_size]` and `[tokens]`.
        """
        frozen = self.training.frozen
        for number, row in enumerate(self.held_out, start=1):
            states = frozen.exit_states(row[None, :-1])
            yield states, frozen.final_logits(states), row[1:].to(states.device)
            on_row(number)


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other trainings from `out` meanwhile; raises ValueError if one is at work on it, or the lock fails."""
    lock = FileLock(out.with_name(out.name + ".unfinished.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"out={str(out)!r}: another training is at work on it: choose another folder") from error
    except OSError as error:
        raise ValueError(f"out={str(out)!r} cannot be written: {error.strerror}; choose another folder") from error
    try:
        check_out(out)
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def check_out(out: Path) -> None:
    """Raise ValueError if a new folder `out` cannot appear."""
    if not out.name or not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r}: give a new folder in one that exists")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is there already: choose another folder, or delete it")


def check_exit_layer(info: ModelInfo, exit_layer: int) -> None:
    """Raise ValueError for a layer without one after it."""
    if exit_layer >= info.num_layers:
        choice = f"with {info.num_layers} layers choose 1 to {info.num_layers - 1}"
        raise ValueError(f"exit_layer={exit_layer}: {choice}")
