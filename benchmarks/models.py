"""The models that benchmarks name: "demo", a folder, or "random:HIDDENxLAYERS"."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from ppd_runtime.models.loading import describe

_HEAD_DIM = 64


@contextlib.contextmanager
def benchmark_model(name: str) -> Iterator[str]:
    """What `describe` takes: a name as it is, or for "random:512x12" a folder that is there while it is needed.

    A random model is a Llama of that hidden size and depth in float32, otherwise of the demo model's proportions and
    with its tokenizer.
    """
    if not name.startswith("random:"):
        yield name
        return
    size = re.fullmatch(r"random:(\d+)x(\d+)", name)
    if size is None or int(size[1]) % (2 * _HEAD_DIM) or not int(size[1]) or not int(size[2]):
        raise SystemExit(f"model {name!r}: give random:HIDDENxLAYERS, HIDDEN a multiple of {2 * _HEAD_DIM}")
    with tempfile.TemporaryDirectory() as folder:
        _save_random_model(Path(folder), int(size[1]), int(size[2]))
        yield folder


def _save_random_model(folder: Path, hidden_size: int, num_layers: int) -> None:
    demo = describe("demo").folder
    config = AutoConfig.from_pretrained(demo)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = num_layers, hidden_size, 3 * hidden_size
    config.num_attention_heads = hidden_size // _HEAD_DIM
    config.num_key_value_heads = config.num_attention_heads // 2
    config.dtype = torch.float32
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo).save_pretrained(folder)
