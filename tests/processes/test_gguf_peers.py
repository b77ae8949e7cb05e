"""Small models of each architecture as GGUF files, which llama.cpp reads too: its logits; skipped without `peers`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import write_model
from gguf_specimens import SPECIMENS, save_specimen
from grids import nightly

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.gguf import kept
from ppd_runtime.models.checkpoint.loading import load_layers

TOKENS = [(37 * number) % 290 + 5 for number in range(60)]
CLOSE = 1e-2
"""Of the spread of logits. What llama.cpp rounds otherwise stays below it (numbers of GELU in float16: 8e-3), and
any other meaning of a file does not."""
APART = {
    "exaone4": "takes windows for those of the model of 64 layers alone",
    "gpt_oss": "rounds the borders of YaRN's ramp, which the model does not",
    **dict.fromkeys(("phi3 longrope",), "leaves windows out"),
    **dict.fromkeys(("starcoder2 without biases", "tied qwen2_moe", "biased qwen3"), "refuses it"),
    "qwen2 yarn of another factor": "has a factor of its own",
    **dict.fromkeys(("phimoe", "phimoe longrope"), "weighs experts otherwise than the model"),
    **dict.fromkeys(("cohere with norms", "qwen3 longrope"), "refuses it"),
}
"""What llama.cpp does otherwise with a file."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(kept, "cache_folder", lambda: tmp_path / "cache")


@nightly
@pytest.mark.parametrize("name", SPECIMENS)
def test_llama_cpp_reads_the_same_model(tmp_path: Path, name: str) -> None:
    if name in APART:
        pytest.skip(f"llama.cpp {APART[name]}")
    file = write_model(tmp_path / "model.gguf", save_specimen(name, tmp_path / "folder"), "F32")
    ours, theirs = logits_here(file), logits_of_llama_cpp(file)
    distance = np.abs(ours - theirs).max(1) / ours.std()
    assert distance.max() < CLOSE, distance.max()


def logits_here(file: Path) -> np.ndarray:
    info = describe(str(file))
    with torch.inference_mode():
        model = load_layers(info, info.num_layers, torch.float32, "cpu")
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def logits_of_llama_cpp(file: Path) -> np.ndarray:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install -e '.[peers]'")
    model = llama_cpp.Llama(
        str(file),
        n_ctx=64,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(TOKENS)
    return np.array(model.scores[: len(TOKENS)])
