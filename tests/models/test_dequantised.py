"""Folders that other programs have quantised: the numbers and texts of the floats that they stand for, or one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_folders import WEIGHTS, Quantise, grouped, integers, scaled, write_folders
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.dequantised import folder as of_floats
from ppd_runtime.models.checkpoint.dequantised.scaled import Scaled
from ppd_runtime.models.checkpoint.dequantised.stored import stored_tensors
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers

ModelFolder = Callable[..., Path]
HUGE = 10**6
"""As many rows or columns as a matrix has: one scale for all."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the folders that another one has kept."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(of_floats, "cache_folder", lambda: tmp_path / "cache")


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for one group of modules."""
    way = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": way, "input_activations": {"num_bits": 8, "dynamic": True}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


def packs(**weights: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for whole numbers in words."""
    return compressed(
        "pack-quantized", **{"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16, **weights}
    )


def gptq(**more: Any) -> dict[str, Any]:
    """The settings of GPTQ."""
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False, **more}


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 16]}
FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 in blocks": (BLOCKS, scaled((24, 16), lambda *shape: shape, "_scale_inv", "float32")),
    "fp8 with a scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        scaled((HUGE, HUGE), lambda *_: (), "_scale", "float32"),
    ),
    "float-quantized by rows": (
        compressed("float-quantized"),
        scaled((1, HUGE), lambda *shape: shape, "_scale", "bfloat16"),
    ),
    "naive-quantized": (
        compressed("naive-quantized", strategy="tensor"),
        scaled((HUGE, HUGE), lambda *_: (1,), "_scale", "bfloat16"),
    ),
    "float-quantized in blocks": (
        compressed("float-quantized", strategy="block", block_structure=[16, 32]),
        scaled((16, 32), lambda *shape: shape, "_scale", "bfloat16"),
    ),
    "gptq": (gptq(), grouped("gptq")),
    "gptq in an order of activations": (gptq(desc_act=True), grouped("gptq", reordered=True)),
    "gptq of 8 bits, one group": (gptq(bits=8, group_size=-1), grouped("gptq", 8, -1)),
    "gptq of 2 bits, symmetric": (gptq(bits=2, sym=True), grouped("gptq", 2, symmetric=True)),
    "gptq_v2": (gptq(checkpoint_format="gptq_v2"), grouped("gptq_v2")),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        grouped("awq"),
    ),
    "awq with its own names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        grouped("awq", group=32),
    ),
    "pack-quantized": (packs(symmetric=True), grouped("pack-quantized", symmetric=True, kind="bfloat16")),
    "pack-quantized with zero points": (packs(symmetric=False), grouped("pack-quantized", kind="bfloat16")),
    "pack-quantized in an order of activations": (
        packs(symmetric=True, actorder="group"),
        grouped("pack-quantized", symmetric=True, reordered=True),
    ),
    "pack-quantized of 8 bits by rows": (
        packs(symmetric=True, num_bits=8, strategy="channel"),
        grouped("pack-quantized", 8, -1, symmetric=True),
    ),
    "int-quantized": (compressed("int-quantized", type="int"), integers),
}


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    info = describe(str(folder))
    return load_layers(info, info.num_layers, torch.float32, "cpu").state_dict()


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_the_weights_that_its_numbers_stand_for(model_folder: ModelFolder, tmp_path: Path, name: str):
    settings, quantise = FORMATS[name]
    quantised, floats = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise)
    ours, expected = state_of(quantised), state_of(floats)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert not hasattr(model_config(describe(str(quantised)).folder), "quantization_config")


@pytest.mark.parametrize("name", ["fp8 in blocks", "gptq in an order of activations", "awq"])
def test_every_layout_gives_the_text_of_the_floats(model_folder: ModelFolder, tmp_path: Path, name: str) -> None:
    settings, quantise = FORMATS[name]
    quantised, floats = write_folders(model_folder("qwen2"), tmp_path, settings, quantise, "bfloat16")
    expected = texts(OrdinaryDecoding(floats))
    assert texts(OrdinaryDecoding(quantised, dtype="float32")) == expected
    for layout in ({"stages": 2}, {"k": 1}):
        with PPDRuntime(quantised, transport="local", dtype="float32", **layout) as runtime:
            assert texts(runtime) == expected
    assert texts(OrdinaryDecoding(quantised, weights="int8")) == texts(OrdinaryDecoding(floats, weights="int8"))


def test_the_weights_are_those_of_the_library(model_folder: ModelFolder, tmp_path: Path) -> None:
    """transformers' own code for fp8 wants blocks that divide a matrix."""
    block = (16, 16)
    settings, quantise = BLOCKS | {"weight_block_size": [*block]}, scaled(block, lambda *s: s, "_scale_inv", "float32")
    quantised, _ = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise)
    way = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32, quantization_config=way).state_dict()
    ours = state_of(quantised)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_stacked_experts_have_a_scale_each(tmp_path: Path) -> None:
    drawn = np.random.default_rng(1)
    quantise = scaled((16, 16), lambda *shape: shape, "_scale_inv", "float32")
    parts, weights = zip(*(quantise(drawn, 40, 24) for _ in range(3)), strict=True)
    names = {"experts.up": "weight", "experts.up_scale_inv": "weight_scale_inv"}
    save_file({name: torch.stack([each[of] for each in parts]) for name, of in names.items()}, tmp_path / WEIGHTS)
    found = Scaled(("F8_E4M3",), (16, 16)).matrices(stored_tensors([tmp_path / WEIGHTS]))
    assert found.keys() == {"experts.up"}
    assert torch.equal(torch.stack(list(found["experts.up"].pieces())), torch.stack(weights))


def test_half_precision_stays_where_it_holds_every_weight(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The scales are powers of two in the first folder alone."""
    for place, dtype in (("whole", torch.bfloat16), ("drawn", torch.float32)):
        quantise = FORMATS["fp8 with a scale"][1]

        def rounded(*about: Any, of=quantise, whole=place == "whole"):
            parts, weights = of(*about)
            scale = parts["weight_scale"]
            return parts | {"weight_scale": torch.full_like(scale, 0.25) if whole else scale}, weights

        (tmp_path / place).mkdir()
        model = model_folder("llama", num_layers=2)
        quantised, _ = write_folders(model, tmp_path / place, FORMATS["fp8 with a scale"][0], rounded, "bfloat16")
        kept = describe(str(quantised)).folder
        assert {tensor.dtype for tensor in load_file(kept / WEIGHTS).values()} == {dtype}
        assert model_config(kept).dtype == dtype


def test_a_folder_is_written_once_and_again_when_it_changes(model_folder, tmp_path, monkeypatch) -> None:
    settings, quantise = FORMATS["int-quantized"]
    quantised, _ = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise)
    first = describe(str(quantised)).folder
    with monkeypatch.context() as patch:
        patch.setattr(of_floats, "_write", lambda *_: pytest.fail("written again"))
        assert describe(str(quantised)).folder == first
    assert {path.name for path in first.iterdir()} == {*(path.name for path in quantised.iterdir()), "floats_of.json"}
    save_file(load_file(quantised / WEIGHTS) | {"model.norm.weight": torch.ones(32)}, quantised / WEIGHTS)
    assert describe(str(quantised)).folder != first


def check_refused(
    model: Path,
    place: Path,
    form: str,
    more: dict[str, Any],
    damage: Callable[[dict[str, torch.Tensor]], Any],
    expected: str,
) -> None:
    """Check that a damaged folder of a format is refused in one line, and that nothing is kept of it."""
    settings, quantise = FORMATS[form]
    quantised, _ = write_folders(model, place, more if "format" in more else settings | more, quantise)
    tensors = load_file(quantised / WEIGHTS)
    damage(tensors)
    save_file(tensors, quantised / WEIGHTS)
    with pytest.raises(ValueError, match="^model '.*quantised': |^model '.*quantised' ") as error:
        describe(str(quantised))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    kept = place / "cache" / "floats"
    assert not kept.exists() or [path for path in kept.iterdir() if path.suffix != ".lock"] == []


SCALE_OF_GPTQ, ZEROS, ORDER = (f"model.layers.1.self_attn.k_proj.{part}" for part in ("scales", "qzeros", "g_idx"))
OF_FEW_BITS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no scales": ("gptq", {}, lambda tensors: tensors.pop(SCALE_OF_GPTQ), f"lacks {SCALE_OF_GPTQ}"),
    "no zero points": ("awq", {}, lambda tensors: tensors.pop(ZEROS), f"lacks {ZEROS}"),
    "no order": ("gptq", {"desc_act": True}, lambda tensors: tensors.pop(ORDER), f"lacks {ORDER}"),
    "an order beyond the groups": (
        "gptq",
        {},
        lambda tensors: tensors[ORDER].fill_(2),
        "has inputs of model.layers.1.self_attn.k_proj in groups 2 to 2 of 2",
    ),
    "an order of negative groups": (
        "gptq",
        {},
        lambda tensors: tensors[ORDER].fill_(-1),
        "has inputs of model.layers.1.self_attn.k_proj in groups -1 to -1 of 2",
    ),
    "a zero point that programs read differently": (
        "gptq",
        {},
        lambda tensors: tensors[ZEROS].fill_(-1),
        "has a zero point of model.layers.1.self_attn.k_proj stored as 15",
    ),
    "scales of another shape": (
        "gptq",
        {},
        lambda tensors: tensors.update({SCALE_OF_GPTQ: tensors[SCALE_OF_GPTQ][:1].clone()}),
        f"has {SCALE_OF_GPTQ} as F16 [1, 16], not as F32/BF16/F16 [2, 16]",
    ),
    "other groups": ("gptq", {"group_size": 8}, lambda _: None, "down_proj.qzeros as I32 [4, 4], not as I32 [8, 4]"),
    "groups that do not divide inputs": (
        "awq",
        {"group_size": 24},
        lambda _: None,
        "no multiple of its group_size, 24",
    ),
    "groups of no size": ("awq", {"group_size": 0}, lambda _: None, "with group_size=0, not read"),
    "groups of a text": ("gptq", {"group_size": "16"}, lambda _: None, "with group_size='16', not read"),
    "three bits": ("gptq", {"bits": 3}, lambda _: None, "quantised by gptq with bits=3, not read"),
    "eight bits": ("awq", {"bits": 8}, lambda _: None, "quantised by awq with bits=8, not read"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, lambda _: None, "checkpoint_format='marlin', not read"),
    "an older marlin": ("gptq", {"is_marlin_format": True}, lambda _: None, "checkpoint_format='marlin', not read"),
    "modules with settings": ("gptq", {"dynamic": {"-:up": {}}}, lambda _: None, "dynamic={'-:up': {}}, not read"),
    "other words": ("gptq", {"pack_dtype": "int8"}, lambda _: None, "with pack_dtype='int8', not read"),
    "gemv": ("awq", {"version": "gemv"}, lambda _: None, "with version='gemv', not read"),
    "a shape of other words": (
        "pack-quantized",
        {},
        lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight_shape"].fill_(16),
        "has model.layers.1.self_attn.k_proj.weight_shape [16, 16] for 4 words in each of 16 rows",
    ),
    "an unknown order": (
        "pack-quantized",
        packs(actorder="random"),
        lambda _: None,
        "with actorder='random', not read",
    ),
    "an order of no setting": (
        "pack-quantized in an order of activations",
        packs(symmetric=True),
        lambda _: None,
        "weight_g_idx as I32 [64], which is part of no weight",
    ),
}


@pytest.mark.parametrize("name", OF_FEW_BITS)
def test_what_is_wrong_with_weights_of_few_bits_is_one_line(model_folder, tmp_path: Path, name: str) -> None:
    form, more, damage, expected = OF_FEW_BITS[name]
    check_refused(model_folder("llama", num_layers=2), tmp_path, form, more, damage, expected)


def test_too_little_room_is_one_line(model_folder: ModelFolder, tmp_path: Path, monkeypatch) -> None:
    settings, quantise = FORMATS["awq"]
    quantised, _ = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 5_000, 5_000))
    with pytest.raises(ValueError, match="quantised' needs .* GB in .*floats, and 5e-06 GB are free; free some"):
        describe(str(quantised))


SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"
DAMAGES: dict[str, tuple[dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no scale": ({}, lambda tensors: tensors.pop(SCALE), "lacks model.layers.0.mlp.up_proj.weight_scale"),
    "a scale of another shape": (
        {},
        lambda tensors: tensors.update({SCALE: tensors[SCALE][:1].clone()}),
        f"{SCALE} is [1, 2] for [64, 32] in blocks of [24, 16]",
    ),
    "whole numbers as a scale": (
        {},
        lambda tensors: tensors.update({SCALE: tensors[SCALE].to(torch.int32)}),
        f"has {SCALE} as I32 [3, 2], not as",
    ),
    "a scale of no weight": (
        {},
        lambda tensors: tensors.update({"model.norm.weight_scale": torch.ones(1)}),
        "has model.norm.weight_scale as F32 [1], which is part of no weight",
    ),
    "other numbers": (
        {},
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        "has model.norm.weight as I8 [32], which is part of no weight",
    ),
    "a scale that is not finite": (
        {},
        lambda tensors: tensors[SCALE].fill_(torch.inf),
        "is damaged: model.layers.0.mlp.up_proj.weight has a weight that is not finite",
    ),
    "no quantised weight": (
        {},
        lambda tensors: [tensors.pop(name) for name in [*tensors] if ".layers." in name],
        "its files hold no such weights",
    ),
    "a block of no size": ({"weight_block_size": [0, 16]}, lambda _: None, "with weight_block_size=[0, 16], not read"),
    "another float": ({"fmt": "e3m4"}, lambda _: None, "with fmt='e3m4', not read"),
    "another program": ({"quant_method": "bitsandbytes"}, lambda _: None, "quantised by bitsandbytes, which is not"),
    "no program": ({"quant_method": 3}, lambda _: None, "quantised by 3, which is not read"),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4),
        lambda _: None,
        "format='nvfp4-pack-quantized of 4 bits (float, symmetric=True)', not read",
    ),
    "sparse": (
        compressed("float-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        lambda _: None,
        "sparsity_config={'format': 'sparse-24-bitmask'}, not read",
    ),
    "rotated": (
        compressed("float-quantized") | {"transform_config": {"config_groups": {}}},
        lambda _: None,
        "transform_config={'config_groups': {}}, not read",
    ),
    "no groups": (compressed("float-quantized") | {"config_groups": []}, lambda _: None, "config_groups=[], not read"),
    "groups of no size": (
        compressed("float-quantized", strategy="group", group_size=0),
        lambda _: None,
        "group_size=0, not a whole number from 1 on",
    ),
    "a scale for each token": (
        compressed("float-quantized", strategy="token"),
        lambda _: None,
        "strategy='token', not read",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_with_a_folder_is_one_line(model_folder: ModelFolder, tmp_path: Path, name: str) -> None:
    more, damage, expected = DAMAGES[name]
    check_refused(model_folder("llama", num_layers=2), tmp_path, "fp8 in blocks", more, damage, expected)
