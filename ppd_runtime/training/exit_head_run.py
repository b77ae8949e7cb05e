"""One training of an exit head, from a model's name and a file of texts to the head's folder."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.measure.exit_heads import HeadComparison, compare_heads
from ppd_runtime.models.fingerprint import model_fingerprint
from ppd_runtime.models.loading import choose_device, choose_dtype, describe, load_layers, load_tokenizer
from ppd_runtime.models.trained_heads import HeadInfo, new_head, save_head
from ppd_runtime.training.checkpoint import Checkpoint
from ppd_runtime.training.exit_head import HeadRecipe, HeadTraining
from ppd_runtime.training.texts import read_texts, token_rows

_HELD_OUT_LENGTH, _HELD_OUT_ROWS = 512, 64  # tokens in a row, rows to compare on


class ExitHeadRun:
    """Trains a head and writes its folder; a run that was stopped goes on where its file beside `out` ends.

    Args:
        model: a local folder, a hub name, or "demo".
        data: a file of texts, or "demo" for the demo model's corpus; see `read_texts`.
        recipe: what to train and how.
        out: the head's folder; it appears when the head is whole.
        dtype: float32, bfloat16, float16 or auto: the frozen model's; the head learns in float32.
        device: cpu, cuda or auto.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """

    def __init__(
        self, model: str, data: str, recipe: HeadRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        _check_out(out)
        self.recipe, self.data, self.out, self.info = recipe, data, out, describe(model)
        if recipe.exit_layer >= self.info.num_layers:
            choice = f"with {self.info.num_layers} layers choose 1 to {self.info.num_layers - 1}"
            raise ValueError(f"exit_layer={recipe.exit_layer}: {choice}")
        place = choose_device(device)
        rows, self._held_out, data_sha256 = self._read_rows()
        frozen = load_layers(self.info, self.info.num_layers, choose_dtype(dtype, place, self.info), place)
        self._settings = {
            **asdict(recipe),
            "model_fingerprint": model_fingerprint(self.info),
            "data_sha256": data_sha256,
            "dtype": str(frozen.dtype).removeprefix("torch."),
        }
        self.training = HeadTraining(recipe, frozen, new_head(recipe.kind, frozen).float(), rows)
        unfinished = out.with_name(out.name + ".unfinished.safetensors")
        self.checkpoint = Checkpoint(unfinished, self.training.head, [self.training.optimizer], self._settings)

    @property
    def num_held_out_rows(self) -> int:
        """Rows that `finish` compares on."""
        return len(self._held_out)

    def train(self, on_step: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Take the steps that are left; `on_step` gets the number of finished steps and the last one's loss."""
        self.training.run(self.checkpoint, on_step)

    def finish(self, on_row: Callable[[int], None] = lambda row: None) -> HeadComparison:
        """Compare the head with the shared one on held-out text and write its folder; `on_row` counts the rows."""
        frozen, head = self.training.frozen, self.training.head
        comparison = compare_heads(frozen.head, self.training.logits, self._passes(on_row), seed=self.recipe.seed)
        save_head(self.out, head, self._head_info(), self._account() | {"held_out": comparison.as_dict()})
        self.checkpoint.discard()
        return comparison

    def _head_info(self) -> HeadInfo:
        return HeadInfo(
            folder=self.out,
            kind=self.recipe.kind,
            model=self.info.name,
            model_fingerprint=self._settings["model_fingerprint"],
            exit_layer=self.recipe.exit_layer,
            hidden_size=self.training.frozen.model.config.hidden_size,
            vocab_size=self.info.vocab_size,
            weights_sha256="",
        )

    def _account(self) -> dict[str, Any]:
        """How the head was trained, for its card."""
        return {
            **self._settings,
            "data": self.data,
            "steps": self.training.num_steps,
            "tokens": self.training.num_tokens,
            "torch_version": torch.__version__,
        }

    def _read_rows(self) -> tuple[Tensor, Tensor, str]:
        """Rows for training, held-out ones, and the hash of the texts."""
        texts, tokenizer = read_texts(self.data), load_tokenizer(self.info)
        length = min(self.recipe.max_length, self.info.max_positions or self.recipe.max_length)
        held_out_length = min(length, _HELD_OUT_LENGTH)
        rows = token_rows(tokenizer, texts.training, length)
        held_out = token_rows(tokenizer, texts.held_out, held_out_length)
        for name, some, needed in (("training", rows, length), ("held-out", held_out, held_out_length)):
            if not len(some):
                raise ValueError(
                    f"{self.data}: its {name} texts have no {needed + 1} tokens, which one row of max_length="
                    f"{self.recipe.max_length} needs: give more text or a smaller max_length"
                )
        every = -(-len(held_out) // _HELD_OUT_ROWS)
        return rows, held_out[::every], texts.sha256

    def _passes(self, on_row: Callable[[int], None]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        frozen = self.training.frozen
        for number, row in enumerate(self._held_out, start=1):
            states = frozen.exit_states(row[None, :-1])
            yield states, frozen.final_logits(states), row[1:].to(states.device)
            on_row(number)


def _check_out(out: Path) -> None:
    if not out.name or not out.parent.is_dir():
        raise ValueError(f"out={str(out)!r}: give a new folder in one that exists")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is there already: choose another folder, or delete it")
