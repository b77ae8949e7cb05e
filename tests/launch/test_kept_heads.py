"""Heads that `ppd adapt` has kept are found by the model's fingerprint, and used where they fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads_for_tests import make_head

from ppd_runtime import PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.trained.heads import AFFINE, HeadInfo
from ppd_runtime.models.trained.kept_heads import COUNTS, kept_heads_folder

ModelFolder = Callable[..., Path]


@pytest.fixture
def model(model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model, with heads for the layers 1 and 2 of 4 in a cache folder of the test's own."""
    folder = model_folder("llama", num_layers=4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = kept_heads_folder(describe(str(folder)))
    kept.mkdir()
    for layer in (1, 2):
        make_head(kept / f"layer-{layer}", folder, AFFINE, layer)
    (kept / COUNTS).write_text(json.dumps({"7": 2, "299": 1}))
    return str(folder)


def layers_of(model: str, **settings: Any) -> list[int]:
    """The layers whose boundaries have trained heads."""
    with PPDRuntime(model, transport="local", **settings) as runtime:
        return [spec.exit_head.exit_layer for spec in runtime._specs if isinstance(spec.exit_head, HeadInfo)]


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"stages": 2}, [2]),
        ({"stages": 3, "cuts": (1, 2)}, [1, 2]),
        ({"stages": 3, "cuts": (2, 3)}, [2]),
        ({"stages": 4}, []),
        ({"stages": 2, "exit_head": "shared"}, []),
        ({"stages": 2, "weights": "int8"}, [2]),
        ({"k": 1}, []),
    ],
)
def test_stages_find_the_heads_of_their_boundaries(model: str, settings: dict[str, Any], layers: list[int]) -> None:
    assert sorted(layers_of(model, **settings)) == layers


def test_their_borders_are_the_heads_layers_and_guesses_are_among_their_tokens(model: str) -> None:
    with PPDRuntime(model, stages=2, guess_vocab=3, transport="local") as runtime:
        assert runtime.cuts == (2,)
        assert {spec.guess_tokens for spec in runtime._specs} == {(), (0, 7, 299)}


def test_other_weights_have_other_heads(model: str, model_folder: ModelFolder) -> None:
    assert layers_of(str(model_folder("llama", num_layers=4, seed=1)), stages=2) == []


def test_damaged_heads_are_left_aside_with_a_line(model: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = kept_heads_folder(describe(model))
    with (kept / "layer-1" / "exit_head.safetensors").open("r+b") as file:
        file.truncate(100)
    assert layers_of(model, stages=2) == []
    (line,) = caplog.messages
    assert line.startswith("the model's own heads guess, for the kept ones cannot be used: exit_head=")
