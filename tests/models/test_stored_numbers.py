"""Folders that other programs have quantised, opened with their own few bits: each weight is the one of the floats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.specimens import Specimen, Wrapper
from foreign_folders import Quantise, grouped, integers, scaled, write_folders
from models_for_tests import build_tokenizer
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.dequantised import folder as of_floats
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.native.linear import QuantisedLinear, with_floats

ModelFolder = Callable[..., Path]


def _ints(bits: int, **more: Any) -> dict[str, Any]:
    """The settings of compressed-tensors for whole numbers of so many bits."""
    way = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **more}
    form = "int-quantized" if way["strategy"] == "channel" else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": way}}}


def _gptq(bits: int, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
FORMS: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "awq": (AWQ, grouped("awq", group=32), "Q5_0"),
    "gptq": (_gptq(4), grouped("gptq", group=32), "Q5_0"),
    "gptq, symmetric": (_gptq(4), grouped("gptq", group=32, symmetric=True), "Q4_0"),
    "gptq of 2 bits": (_gptq(2), grouped("gptq", 2, 32), "Q4_0"),
    "gptq of 8 bits, one group": (_gptq(8, -1), grouped("gptq", 8, -1, symmetric=True), "Q8_0"),
    "pack-quantized": (_ints(4), grouped("pack-quantized", group=32, symmetric=True, kind="bfloat16"), "Q4_0"),
    "pack-quantized with zero points": (_ints(4, symmetric=False), grouped("pack-quantized", group=32), "Q5_0"),
    "int-quantized": (_ints(8, strategy="channel"), integers, "Q8_0"),
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32]}
UNFIT: dict[str, tuple[dict[str, Any], Quantise]] = {
    "groups of 16": (AWQ | {"group_size": 16}, grouped("awq", group=16)),
    "8 bits with zero points": (_gptq(8), grouped("gptq", 8, 32)),
    "scales of more digits": (_ints(4), grouped("pack-quantized", group=32, symmetric=True, kind="float32")),
    "fp8": (BLOCKS, scaled((16, 32), lambda *shape: shape, "_scale_inv", "bfloat16")),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the folders that another one has kept."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(of_floats, "cache_folder", lambda: tmp_path / "cache")


def loaded(folder: Path, weights: str | None = None) -> torch.nn.Module:
    info = describe(str(folder), weights)
    return load_layers(info, info.num_layers, torch.float32, "cpu")


@pytest.mark.parametrize("name", FORMS)
def test_each_weight_is_the_one_of_the_floats(model_folder: ModelFolder, tmp_path: Path, name: str) -> None:
    settings, quantise, form = FORMS[name]
    quantised, floats = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise, "bfloat16")
    model, expected = loaded(quantised, "stored"), loaded(floats).state_dict()
    linears = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(linears) == 2 * 7
    assert {linear.form.name for linear in linears} == {form}
    found = with_floats(model).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_every_layout_gives_ordinary_decodings_text(model_folder: ModelFolder, tmp_path: Path) -> None:
    settings, quantise, _ = FORMS["awq"]
    quantised, _ = write_folders(model_folder("qwen2"), tmp_path, settings, quantise, "bfloat16")
    asked: dict[str, Any] = {"model": str(quantised), "weights": "stored"}
    expected = texts(OrdinaryDecoding(**asked, compile=False))
    for layout in ({"stages": 2}, {"k": 1}, {"stages": 1}):
        with PPDRuntime(transport="local", **asked, **layout) as runtime:
            assert texts(runtime) == expected

    again = describe(str(describe(str(quantised), "stored").folder))
    assert again.weights == "stored"
    assert texts(OrdinaryDecoding(again.folder, compile=False)) == expected


@pytest.mark.parametrize("specimen", [Specimen("qwen3_moe"), Wrapper("qwen3_vl")], ids=lambda value: value.family)
def test_stacked_experts_and_other_parts_of_a_wrapper_are_left(specimen: Specimen, tmp_path: Path) -> None:
    specimen.build().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    quantised, floats = write_folders(tmp_path / "model", tmp_path, *FORMS["int-quantized"][:2])
    model, expected = loaded(quantised, "stored"), loaded(floats).state_dict()
    packed = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, QuantisedLinear)}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= packed
    found = with_floats(model).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_matrix_that_does_not_fit_is_in_floats(model_folder: ModelFolder, tmp_path: Path) -> None:
    """One of a layer's, whose groups are not of neighbours, beside others with few bits."""
    quantise = grouped("gptq", group=32, reordered=True)
    settings = _gptq(4, desc_act=True)
    quantised, floats = write_folders(model_folder("llama", num_layers=2), tmp_path, settings, quantise)
    model, expected = loaded(quantised, "stored"), loaded(floats).state_dict()
    packed = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, QuantisedLinear)}
    assert packed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    found = with_floats(model).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", UNFIT)
def test_what_no_format_holds_is_refused_in_a_line(model_folder: ModelFolder, tmp_path: Path, name: str) -> None:
    quantised, _ = write_folders(model_folder("llama", num_layers=2), tmp_path, *UNFIT[name])
    with pytest.raises(ValueError, match=r"^model '.*quantised' has no matrix .* leave weights out$") as error:
        describe(str(quantised), "stored")
    assert "\n" not in str(error.value)


def test_other_models_have_no_such_numbers(model_folder: ModelFolder) -> None:
    with pytest.raises(
        ValueError, match="^weights='stored': no other program has quantised model .*leave weights out$"
    ):
        describe(str(model_folder("llama")), "stored")
