"""`dtype="auto"` on a CPU: measured once, kept, the same for every way of decoding, and never a reason to fail."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.dtype import CLEARLY_FASTER, choose_dtype, fastest_dtype, measure_ratio

ModelFolder = Callable[..., Path]
LAYER = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that findings of this test are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ppd_runtime"


def found(ratio: float, cache: Path) -> None:
    """Change the only finding."""
    (path,) = cache.glob("dtype-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"float32_over_dtype": ratio}))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_what_was_found_first_decides_from_then_on(cache: Path, stored: torch.dtype) -> None:
    with ThreadPoolExecutor(4) as pool:
        first = set(pool.map(lambda _: fastest_dtype(LAYER, 2, stored, 1), range(4)))
    assert len(first) == 1
    assert first <= {stored, torch.float32}
    found(CLEARLY_FASTER + 0.1, cache)
    assert fastest_dtype(LAYER, 2, stored, 1) == stored
    found(CLEARLY_FASTER - 0.1, cache)
    assert fastest_dtype(LAYER, 2, stored, 1) == torch.float32


def test_other_shapes_depths_and_threads_are_other_findings(cache: Path) -> None:
    fastest_dtype(LAYER, 2, torch.bfloat16, 1)
    found(99.0, cache)
    for layer, num_layers, threads in ((LAYER[0], 2, 1), (LAYER, 3, 1), (LAYER, 2, 2)):
        fastest_dtype(layer, num_layers, torch.bfloat16, threads)
    assert len(list(cache.glob("dtype-*.json"))) == 4
    assert all(path.name.startswith("dtype-") for path in cache.iterdir()), "nothing half-written stays"


def test_every_way_of_decoding_gets_the_same(cache: Path, model_folder: ModelFolder) -> None:
    model = str(model_folder("llama", dtype="bfloat16"))
    choose_dtype("auto", "cpu", describe(model))
    for ratio, expected in ((5.0, torch.bfloat16), (0.5, torch.float32)):
        found(ratio, cache)
        assert OrdinaryDecoding(model).stage.model.dtype == expected
        assert {spec.dtype for spec in PPDRuntime(model)._specs} == {expected}


def test_compiled_products_of_our_own_are_in_float32(cache: Path, model_folder: ModelFolder) -> None:
    info = describe(str(model_folder("llama", dtype="bfloat16")))
    choose_dtype("auto", "cpu", info)
    for ratio in (5.0, 0.5):
        found(ratio, cache)
        assert choose_dtype("auto", "cpu", info, compiled=True) == torch.float32
    assert choose_dtype("bfloat16", "cpu", info, compiled=True) == torch.bfloat16


def test_models_stored_in_float32_are_run_in_it_unmeasured(cache: Path, model_folder: ModelFolder) -> None:
    assert choose_dtype("auto", "cpu", describe(str(model_folder("llama")))) == torch.float32
    assert not cache.exists()


def test_where_nothing_can_be_kept_it_is_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fastest_dtype(LAYER, 2, torch.bfloat16, 1) == torch.float32
    assert "dtype auto: float32" in caplog.text
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"float32_over_dtype": "fast"}'])
def test_a_damaged_finding_is_made_anew(cache: Path, content: str) -> None:
    fastest_dtype(LAYER, 2, torch.bfloat16, 1)
    (path,) = cache.glob("dtype-*.json")
    path.write_text(content)
    found = fastest_dtype(LAYER, 2, torch.bfloat16, 1)
    assert json.loads(path.read_text())["float32_over_dtype"] > 0
    assert fastest_dtype(LAYER, 2, torch.bfloat16, 1) == found


def test_the_demo_model_and_what_is_said_of_it(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = describe("demo")
    with caplog.at_level(logging.INFO):
        chosen = choose_dtype("auto", "cpu", info)
    assert f"dtype auto: {str(chosen).removeprefix('torch.')} on cpu" in caplog.text
    assert len(list(cache.glob("dtype-*.json"))) == 1


def test_a_layer_of_any_size_is_measured_in_little_memory() -> None:
    """15 GB in both dtypes, if it were whole."""
    assert measure_ratio([(500_000, 4096), (16, 500_000)], 80, torch.bfloat16, 1) > 0
