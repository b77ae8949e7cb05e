"""gpt-oss as it is published: experts in MXFP4, with the weights and texts of the floats that they stand for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from families.specimens import Specimen
from models_for_tests import build_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.dequantised import folder as of_floats
from ppd_runtime.models.checkpoint.description import describe

WEIGHTS = "model.safetensors"
EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(of_floats, "cache_folder", lambda: tmp_path / "cache")


def of_four_bits(code: int) -> float:
    """What a number of four bits stands for: a sign, two digits of an exponent, one of a fraction."""
    sign, exponent, fraction = -1 if code >> 3 else 1, code >> 1 & 3, code & 1
    return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))


def drawn_experts(drawn: np.random.Generator, experts: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and the weights `[experts, inputs, outputs]`, number by number."""
    blocks = drawn.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
    scales = drawn.integers(119, 123, (experts, outputs, inputs // 32)).astype(np.uint8)
    weights = np.zeros((experts, inputs, outputs), np.float32)
    for expert, column, row in np.ndindex(experts, inputs, outputs):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        code = byte >> 4 if column % 2 else byte & 15
        weights[expert, column, row] = of_four_bits(code) * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
    return torch.from_numpy(blocks), torch.from_numpy(scales), torch.from_numpy(weights)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder in MXFP4, and one of floats with the same numbers."""
    quantised, floats = tmp_path / "quantised", tmp_path / "floats"
    Specimen("gpt_oss").build().to(torch.bfloat16).save_pretrained(floats)
    build_tokenizer().save_pretrained(floats)
    shutil.copytree(floats, quantised)
    tensors, drawn = load_file(floats / WEIGHTS), np.random.default_rng(3)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        blocks, scales, weights = drawn_experts(drawn, *tensors[name].shape)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = weights.to(torch.bfloat16)
        assert torch.equal(tensors[name].float(), weights)
        assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32), weights)
    save_file(tensors, floats / WEIGHTS, {"format": "pt"})
    save_file(stored, quantised / WEIGHTS, {"format": "pt"})
    config = json.loads((quantised / "config.json").read_text())
    more = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (quantised / "config.json").write_text(json.dumps(config | more))
    return quantised, floats


def test_weights_and_texts_are_those_of_the_floats(folders: tuple[Path, Path]) -> None:
    quantised, floats = folders
    kept = describe(str(quantised)).folder
    ours, expected = load_file(kept / WEIGHTS), load_file(floats / WEIGHTS)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) and ours[name].dtype == expected[name].dtype for name in ours)
    assert model_config(kept).dtype == torch.bfloat16
    text = texts(OrdinaryDecoding(floats, dtype="float32"))
    assert texts(OrdinaryDecoding(quantised, dtype="float32")) == text
    with PPDRuntime(quantised, transport="local", stages=2, dtype="float32") as runtime:
        assert texts(runtime) == text
    with pytest.raises(ValueError, match="has no matrix of a layer .*; leave weights out$"):
        describe(str(quantised), "stored")


@pytest.mark.parametrize("damage", ["no scales", "other scales", "other blocks", "not finite"])
def test_what_is_wrong_is_one_line(folders: tuple[Path, Path], damage: str) -> None:
    quantised, _ = folders
    tensors = load_file(quantised / WEIGHTS)
    name = next(name for name in tensors if name.endswith("down_proj_blocks"))
    scales = name.replace("blocks", "scales")
    if damage == "no scales":
        del tensors[scales]
    elif damage == "other scales":
        tensors[scales] = tensors[scales][:, :1].clone()
    elif damage == "other blocks":
        tensors[name] = tensors[name][..., :8].clone()
    else:
        tensors[scales].fill_(255)
    save_file(tensors, quantised / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="^model '.*quantised' ") as error:
        describe(str(quantised))
    reason = {
        "no scales": f"lacks {scales}",
        "other scales": f"has {scales} as U8",
        "other blocks": "not as [experts, outputs, blocks, 16]",
        "not finite": "has a weight that is not finite",
    }[damage]
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
