"""The models that benchmarks run: any that the runtime takes, or a Llama of random weights in a temporary folder."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.peer_files import converted_file, gguf_file
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.hub import DEMO
from ppd_runtime.models.checkpoint.packages import SMOLLM2, packaged_file
from ppd_runtime.models.trained.drafter import DrafterNetwork, save_drafter
from ppd_runtime.models.trained.kept_heads import kept_drafter
from ppd_runtime.settings.config import NONE

_RANDOM = "random:"
_HEAD_DIM = 64
SHAPES: Mapping[str, tuple[int, ...]] = {
    "little": (256, 2, 1, 512, 4, 0),
    "small": (1024, 8, 2, 2816, 8, 0),
    "300m": (768, 6, 2, 3072, 24, 128256),
    "llama3-8b": (4096, 32, 8, 14336, 32, 128256),
}
"""By name: the hidden size, query heads, key/value heads, the MLP's width, layers, and the vocabulary, 0 for the demo
model's. Heads have dimension 128, as in released models."""

MODEL_HELP = (
    'a folder, a GGUF file, a hub name, "demo", "smollm2", '
    f"{_RANDOM}HIDDENxLAYERS, or {_RANDOM} with {', '.join(SHAPES)}; smollm2 and random models with a file type of "
    "llama.cpp's, such as smollm2:Q8_0"
)


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """The name that the runtime takes for `name`; for random:… a folder that is gone afterwards.

    Raises:
        ValueError: as `random_config` and `converted_file`.
    """
    kind = re.fullmatch(rf"({SMOLLM2}|{_RANDOM}.+):([A-Z0-9_]+)", name)
    if not kind and not name.startswith(_RANDOM):
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="ppd-model-") as path:
        folder = Path(path)
        if kind:
            file = packaged_file(kind[1]) or gguf_file(_random_folder(kind[1], folder), "bfloat16", folder)
            yield str(converted_file(file, kind[2], folder))
        else:
            yield str(_random_folder(name, folder))


def _random_folder(name: str, folder: Path) -> Path:
    """A model of random weights with the demo model's tokenizer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers_logging.disable_progress_bar()
    random_model(random_config(name.removeprefix(_RANDOM)), torch.bfloat16, device).save_pretrained(folder)
    for file in describe(DEMO).folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@contextlib.contextmanager
def untrained_drafter(info: ModelInfo) -> Iterator[str]:
    """A drafter of random numbers, which is never right, in the place of the one that is kept for a model; the setting
    for it. "none" where none is kept.
    """
    kept = kept_drafter(info)
    if kept is None:
        yield NONE
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="ppd-drafter-") as folder:
        yield str(save_drafter(Path(folder, kept.NAME), DrafterNetwork(kept.hidden_size), kept, {}).folder)


def random_config(shape: str) -> LlamaConfig:
    """That of one of `SHAPES`, or of HIDDENxLAYERS with as many key as query heads, of dimension 64.

    Raises:
        ValueError: for another form, or a width that is no multiple of 64.
    """
    form = re.fullmatch(r"(\d+)x(\d+)", shape)
    if shape in SHAPES:
        hidden_size, heads, shared, mlp, num_layers, vocab_size = SHAPES[shape]
        more = {"head_dim": 128, "max_position_embeddings": 8192, "initializer_range": 0.1}
    elif form and int(form[2]) > 1 and int(form[1]) and not int(form[1]) % _HEAD_DIM:
        hidden_size, num_layers, vocab_size = int(form[1]), int(form[2]), 0
        mlp, heads = -(-hidden_size * 8 // 3 // _HEAD_DIM) * _HEAD_DIM, hidden_size // _HEAD_DIM
        shared, more = heads, {"max_position_embeddings": 2048}
    else:
        raise ValueError(
            f"--model {_RANDOM}{shape}: give {_RANDOM}HIDDENxLAYERS with a multiple of {_HEAD_DIM} and at least 2 "
            f"layers, such as {_RANDOM}512x12, or {_RANDOM} with {', '.join(SHAPES)}"
        )
    return LlamaConfig(
        vocab_size=vocab_size or describe(DEMO).vocab_size,
        hidden_size=hidden_size,
        intermediate_size=mlp,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        tie_word_embeddings=shape == "300m",
        **more,
    )


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of random weights, always the same on one kind of device, and made there."""
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()
