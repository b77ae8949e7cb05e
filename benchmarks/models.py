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
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.hub import DEMO
from ppd_runtime.models.checkpoint.packages import SMOLLM2, packaged_file

_RANDOM = "random:"
_HEAD_DIM = 64
SHAPES: Mapping[str, Mapping[str, int]] = {
    "little": {"hidden_size": 256, "heads": 2, "shared": 1, "mlp": 512, "layers": 4, "vocab": 0},
    "small": {"hidden_size": 1024, "heads": 8, "shared": 2, "mlp": 2816, "layers": 8, "vocab": 0},
    "300m": {"hidden_size": 768, "heads": 6, "shared": 2, "mlp": 3072, "layers": 24, "vocab": 128256},
    "llama3-8b": {"hidden_size": 4096, "heads": 32, "shared": 8, "mlp": 14336, "layers": 32, "vocab": 128256},
}
"""Of models with grouped-query heads of dimension 128, as released ones have them; no vocabulary: the demo model's."""

MODEL_HELP = (
    'a folder, a GGUF file, a hub name, "demo", "smollm2", '
    f"{_RANDOM}HIDDENxLAYERS, or {_RANDOM} with {', '.join(SHAPES)}; smollm2 and random models with a file type of "
    "llama.cpp's, such as smollm2:Q8_0"
)


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """The name that the runtime takes for `name`; for random:… a folder that is gone afterwards.

    Raises:
        ValueError: for a random model of no such form, or whose width is no multiple of 64.
    """
    kind = re.fullmatch(rf"({SMOLLM2}|{_RANDOM}.+):([A-Z0-9_]+)", name)
    if not kind and not name.startswith(_RANDOM):
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="ppd-model-") as folder:
        if not kind:
            yield _random_folder(name, Path(folder))
            return
        file = packaged_file(kind[1]) or gguf_file(
            Path(_random_folder(kind[1], Path(folder))), "bfloat16", Path(folder)
        )
        yield str(converted_file(file, kind[2], Path(folder)))


def _random_folder(name: str, folder: Path) -> str:
    """A model of random weights with the demo model's tokenizer."""
    config = random_config(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers_logging.disable_progress_bar()
    random_model(config, torch.bfloat16, device).save_pretrained(folder)
    for file in describe(DEMO).folder.glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def random_config(name: str) -> LlamaConfig:
    """That of random:SHAPE, or of random:HIDDENxLAYERS with as many key as query heads, of dimension 64."""
    if (shape := name.removeprefix(_RANDOM)) in SHAPES:
        return shape_config(shape)
    form = re.fullmatch(rf"{_RANDOM}(\d+)x(\d+)", name)
    if not form or int(form[1]) % _HEAD_DIM or not int(form[1]) or int(form[2]) < 2:
        raise ValueError(
            f"--model {name}: give random:HIDDENxLAYERS with a multiple of {_HEAD_DIM} and at least 2 layers, "
            f"such as random:512x12, or {_RANDOM} with {', '.join(SHAPES)}"
        )
    hidden_size, num_layers = int(form[1]), int(form[2])
    return LlamaConfig(
        vocab_size=describe(DEMO).vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // _HEAD_DIM) * _HEAD_DIM,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // _HEAD_DIM,
        num_key_value_heads=hidden_size // _HEAD_DIM,
        max_position_embeddings=2048,
    )


def shape_config(shape: str) -> LlamaConfig:
    """The configuration of one of `SHAPES`."""
    of = SHAPES[shape]
    return LlamaConfig(
        vocab_size=of["vocab"] or describe(DEMO).vocab_size,
        hidden_size=of["hidden_size"],
        intermediate_size=of["mlp"],
        num_hidden_layers=of["layers"],
        num_attention_heads=of["heads"],
        num_key_value_heads=of["shared"],
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=shape == "300m",
    )


def random_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of random weights, always the same on one kind of device, and made there."""
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()
