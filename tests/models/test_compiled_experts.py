"""Compiled passes through stacked experts, of few bits and in floats: layouts give ordinary decoding's texts."""

from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from families.attack import prompts
from gguf_files import write_model
from gguf_specimens import save_specimen
from grids import nightly

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint import weight_cache

pytestmark = [needs_compiler, pytest.mark.usefixtures("own_gguf_cache")]
ROWS = 6
LAYOUTS = ({"stages": 2, "k": 2, "rows": 4}, {"stages": 1, "rows": 4}, {"k": 1})


def text(generator: OrdinaryDecoding | PPDRuntime, prompt: list[int]) -> object:
    found = generator.generate(prompt, max_new_tokens=10, ignore_eos=True, logprobs=2, temperature=0.9, seed=4)
    return found.token_ids, found.logprobs


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("F32", marks=nightly), pytest.param("BF16", marks=nightly)])
def test_layouts_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of floats in bfloat16, processes share copies as large as these."""
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(weight_cache, "SETTLED_S", -1.0)
    file = write_model(tmp_path / "model.gguf", save_specimen("olmoe", tmp_path / "folder"), kind)
    compiled = {"model": str(file), "dtype": "float32", "compile": True}
    ordinary, asked = OrdinaryDecoding(**compiled), prompts((3, 30))
    expected = [text(ordinary, prompt) for prompt in asked]
    for layout in LAYOUTS:
        with PPDRuntime(transport="local", **layout, **compiled) as runtime:
            assert [text(runtime, prompt) for prompt in asked] == expected, layout
    ours, library = ordinary.stage, OrdinaryDecoding(str(file), dtype="float32", compile=False).stage
    states = torch.randn(1, ROWS, ours.state_size, generator=torch.Generator().manual_seed(1))
    for stage in (ours, library):
        stage.begin(64)
        stage.run(0, stage.num_layers, [3, 4, 5], 0)
    for row in range(ROWS):
        found, numbers = (stage.run(1, 2, states[:, row : row + 1], 3 + row) for stage in (ours, library))
        assert (found - numbers).norm() < 1e-5 * numbers.norm()
