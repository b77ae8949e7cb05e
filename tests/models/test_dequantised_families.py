"""Quantised models with experts, and text models of those that also read pictures: the texts of their floats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families.specimens import Specimen, Wrapper
from foreign_folders import Quantise, grouped, scaled, write_folders
from models_for_tests import build_tokenizer
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.dequantised import folder as of_floats
from ppd_runtime.models.checkpoint.description import describe

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
WAYS: dict[str, tuple[dict[str, Any], Callable[[], Quantise]]] = {
    "fp8": (FP8, lambda: scaled((16, 16), lambda *shape: shape, "_scale_inv", "float32")),
    "awq": (AWQ, lambda: grouped("awq", group=8)),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(of_floats, "cache_folder", lambda: tmp_path / "cache")


def quantised(specimen: Specimen, place: Path, way: str) -> tuple[Path, Path]:
    """A quantised folder of a specimen, and one of floats."""
    specimen.build().save_pretrained(place / "model")
    build_tokenizer().save_pretrained(place / "model")
    settings, quantise = WAYS[way]
    return write_folders(place / "model", place, settings, quantise())


@pytest.mark.parametrize(
    ("specimen", "way"),
    [
        (Specimen("qwen3_moe"), "fp8"),
        (Specimen("qwen3_moe"), "awq"),
        (Specimen("deepseek_v3"), "fp8"),
        (Wrapper("gemma3"), "fp8"),
        (Wrapper("qwen3_vl"), "awq"),
        (Wrapper("mistral3"), "fp8"),
    ],
    ids=lambda value: getattr(value, "family", value),
)
def test_the_text_is_that_of_the_floats(specimen: Specimen, way: str, tmp_path: Path) -> None:
    folder, floats = quantised(specimen, tmp_path, way)
    expected = texts(OrdinaryDecoding(floats))
    assert texts(OrdinaryDecoding(folder)) == expected
    with PPDRuntime(folder, transport="local", stages=2) as runtime:
        assert texts(runtime) == expected


def test_a_text_model_may_have_the_settings(tmp_path: Path) -> None:
    folder, floats = quantised(Wrapper("gemma3"), tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert texts(OrdinaryDecoding(folder)) == texts(OrdinaryDecoding(floats))
    config["text_config"]["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised by hqq, which is not read"):
        describe(str(folder))
