"""The models that benchmarks run: any that the runtime takes, or a Llama of random weights in a temporary folder."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.hub import DEMO

_RANDOM = "random:"
_HEAD_DIM = 64


@contextlib.contextmanager
def model_folder(name: str) -> Iterator[str]:
    """The name that the runtime takes for `name`; for random:HIDDENxLAYERS a folder that is gone afterwards.

    Raises:
        ValueError: for a random model of no such form, or whose width is no multiple of 64.
    """
    if not name.startswith(_RANDOM):
        yield name
        return
    hidden_size, num_layers = random_shape(name)
    with tempfile.TemporaryDirectory(prefix="ppd-model-") as folder:
        _save_random_llama(Path(folder), hidden_size, num_layers)
        yield folder


def random_shape(name: str) -> tuple[int, int]:
    """Width and depth of random:HIDDENxLAYERS."""
    form = re.fullmatch(rf"{_RANDOM}(\d+)x(\d+)", name)
    if not form or int(form[1]) % _HEAD_DIM or not int(form[1]) or int(form[2]) < 2:
        raise ValueError(
            f"--model {name}: give random:HIDDENxLAYERS with a multiple of {_HEAD_DIM} and at least 2 layers, "
            "such as random:512x12"
        )
    return int(form[1]), int(form[2])


def _save_random_llama(folder: Path, hidden_size: int, num_layers: int) -> None:
    """Llama's proportions with the demo model's tokenizer; bfloat16 on disk, which every dtype can be read from."""
    demo = describe(DEMO)
    config = LlamaConfig(
        vocab_size=demo.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // _HEAD_DIM) * _HEAD_DIM,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // _HEAD_DIM,
        num_key_value_heads=hidden_size // _HEAD_DIM,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    transformers_logging.disable_progress_bar()
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in demo.folder.glob("tokenizer*"):
        shutil.copy(file, folder)
