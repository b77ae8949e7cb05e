"""A training from a model's name and a file of texts to a folder: what all of them check, read and keep."""

import contextlib
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from ppd_runtime.models.checkpoint.description import ModelInfo, load_tokenizer
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.training.adapt.work_folder import WorkFolder
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.loop import RecipeTraining
from ppd_runtime.training.recipe import Recipe
from ppd_runtime.training.texts import read_texts, token_rows
from ppd_runtime.tune.measured_on import versions

HELD_OUT_LENGTH, HELD_OUT_ROWS = 512, 64
"""Most tokens in a row, and most rows, to compare on."""


class TrainingRun(ABC):
    """Trains something and writes its folder; a run that was stopped goes on where its folder beside `out` ends.

    Args:
        model: the model that it begins with.
        data: a file of texts, or "demo" for the demo model's corpus; see `read_texts`.
        recipe: what to train and how.
        out: the folder; it appears when everything is whole.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """

    training: RecipeTraining

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

    @property
    def unfinished(self) -> Path:
        """The folder that keeps an unfinished training."""
        return self.out.with_name(self.out.name + ".unfinished")

    @property
    def checkpoint(self) -> Checkpoint:
        """Keeps the training's last step."""
        return Checkpoint(self.unfinished / "steps.safetensors", self.training.network, [self.training.optimizer])

    def train(
        self,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        on_read: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """Take the steps that are left.

        Args:
            on_step: gets the number of finished steps and the last one's loss.
            on_read: gets the number of rows that the model has read before the steps, and of those that it is to read.

        Raises:
            ValueError: if another process trains into the same folder, what is kept beside it is of another
                training, or nothing can be written there.
        """
        with alone(self.out):
            WorkFolder(self.unfinished, self.settings)
            for done, of in self.reading():
                on_read(done, of)
            self.training.take_steps(self.checkpoint, on_step)

    def reading(self) -> Iterator[tuple[int, int]]:
        """Have the model read what the steps need; yields the number of rows that it has read, and of all of them."""
        return iter(())

    def finish(self, on_row: Callable[[int], None] = lambda row: None) -> Any:
        """Compare on held-out text and write the folder; `on_row` counts the rows. Raises ValueError as `train`."""
        with alone(self.out):
            report = self.write(on_row)
            shutil.rmtree(self.unfinished, ignore_errors=True)
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


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep other trainings from `out`, which does not exist yet, meanwhile.

    Raises:
        ValueError: if another training is at work on it, the lock fails, or a new folder `out` cannot appear.
    """
    with locked(out, f"out={str(out)!r}: another training is at work on it: choose another folder"):
        check_out(out)
        yield


@contextlib.contextmanager
def locked(out: Path, if_taken: str) -> Iterator[None]:
    """Keep other trainings from `out` meanwhile; ValueError if the lock fails, or `if_taken` if one has it."""
    _check_writable(out)
    lock = FileLock(out.with_name(out.name + ".unfinished.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(if_taken) from error
    except OSError as error:
        raise ValueError(f"out={str(out)!r} cannot be written: {error.strerror}; choose another folder") from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def check_out(out: Path) -> None:
    """Raise ValueError if a new folder `out` cannot appear; leaves nothing behind."""
    if not out.name or not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r}: give a new folder in one that exists")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is there already: choose another folder, or delete it")
    _check_writable(out)


def _check_writable(out: Path) -> None:
    """Raise ValueError if nothing can be written beside `out`: locks there fail as if another process had them."""
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        reason = f"nothing can be written in {str(out.parent)!r} ({error.strerror})"
        raise ValueError(f"out={str(out)!r}: {reason}; give a new folder elsewhere") from error
