"""One LayerSkip training, from a model or its shape alone and a file of texts to a model folder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.models.checkpoint.description import check_hidden_states, describe, load_tokenizer
from ppd_runtime.models.checkpoint.dtype import choose_device
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers, new_model, no_progress_bar
from ppd_runtime.settings.checks import check_depth
from ppd_runtime.training.exit_scores import ExitScore, exit_scores
from ppd_runtime.training.layerskip import LayerSkipRecipe, LayerSkipTraining
from ppd_runtime.training.run import TrainingRun, check_out

CARD = "layerskip.json"
_GENERATION = "generation_config.json"
_DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class LayerSkipReport:
    """Every exit on held-out text; `before` is empty for a model that began from scratch."""

    num_tokens: int
    before: list[ExitScore]
    after: list[ExitScore]

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


class LayerSkipRun(TrainingRun):
    """Trains a model and writes its folder; a run that was stopped goes on where its folder beside `out` ends.

    Args:
        model: a local folder, a hub name, or "demo"; from scratch its config and tokenizer are enough.
        data: a file of texts, or "demo" for the demo model's corpus; see `read_texts`.
        recipe: how.
        out: the new model's folder; it appears when the model is whole.
        dtype: float32, bfloat16 or auto (bfloat16 on GPUs): the products'; weights learn in float32, and are saved in
            the model's own dtype.
        device: cpu, cuda or auto.

    Raises:
        ValueError: for anything that cannot work, before anything is written.
    """

    training: LayerSkipTraining

    def __init__(
        self, model: str, data: str, recipe: LayerSkipRecipe, out: Path, dtype: str = "auto", device: str = "auto"
    ) -> None:
        check_out(out)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(_DTYPES)}")
        info = describe(model, needs_weights=not recipe.from_scratch)
        check_hidden_states(info, "training")
        check_depth(info.num_layers, "an early exit", model)
        self.recipe, self._device = recipe, choose_device(device)
        super().__init__(info, data, recipe, out)
        half = dtype == "bfloat16" or (dtype == "auto" and self._device != "cpu")
        self.settings["dtype"] = "bfloat16" if half else "float32"
        self.training = LayerSkipTraining(recipe, self._beginning(), self.rows, half)

    @property
    def num_held_out_rows(self) -> int:
        """Rows that `finish` runs."""
        return len(self.held_out) * (1 if self.recipe.from_scratch else 2)

    def write(self, on_row: Callable[[int], None]) -> LayerSkipReport:
        """Measure every exit on held-out text and write the model's folder; `on_row` counts the rows."""
        model = self._as_saved()
        after = exit_scores(model, self.held_out, on_row)
        before: list[ExitScore] = []
        if not self.recipe.from_scratch:
            before = exit_scores(self._beginning(), self.held_out, lambda row: on_row(len(self.held_out) + row))
        report = LayerSkipReport(self.held_out[:, 1:].numel(), before, after)
        self._write(model, report)
        return report

    def _beginning(self) -> PreTrainedModel:
        if self.recipe.from_scratch:
            return new_model(self.info, self.recipe.seed, self._device)
        return load_layers(self.info, self.info.num_layers, torch.float32, self._device)

    @property
    def _saved_dtype(self) -> torch.dtype:
        dtype = AutoConfig.from_pretrained(self.info.folder, trust_remote_code=False).dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @torch.no_grad()
    def _as_saved(self) -> PreTrainedModel:
        """The trained model, its weights rounded as its files hold them: what is measured is what is written."""
        model = self.training.model
        for parameter in model.parameters():
            parameter.copy_(parameter.to(self._saved_dtype))
        return model.requires_grad_(False)

    def _write(self, model: PreTrainedModel, report: LayerSkipReport) -> None:
        with atomic_file(self.out) as unfinished, no_progress_bar():
            try:
                model.to(self._saved_dtype).save_pretrained(unfinished)
            except SafetensorError as error:  # such as a full disk
                raise OSError(str(error)) from error
            load_tokenizer(self.info).save_pretrained(unfinished)
            if (self.info.folder / _GENERATION).exists():
                shutil.copy(self.info.folder / _GENERATION, unfinished)
            card = json.dumps(self._card(unfinished, report), indent=2)
            (unfinished / CARD).write_text(card + "\n", encoding="utf-8")

    def _card(self, folder: Path, report: LayerSkipReport) -> dict[str, Any]:
        account = self.account() | {"held_out": report.as_dict()}
        return {"fingerprint": model_fingerprint(describe(str(folder))), "model": self.info.name, "training": account}
