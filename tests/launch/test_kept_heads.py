"""Heads that `ppd adapt` has kept are found by the model's fingerprint, and used where they fit."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from heads_for_tests import make_drafter, make_head

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.trained import kept_heads
from ppd_runtime.models.trained.heads import AFFINE, HeadInfo
from ppd_runtime.models.trained.kept_heads import COUNTS, DRAFTER, folder_name, kept_heads_folder

ModelFolder = Callable[..., Path]


@pytest.fixture
def model(model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model, with heads for the layers 1 and 2 of 4 in a folder of the test's own; compiled code is shared."""
    folder, own = model_folder("llama", num_layers=4), tmp_path / "ppd_runtime"
    own.mkdir()
    monkeypatch.setattr(kept_heads, "cache_folder", lambda: own)
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
        ({"k": 1}, [2]),
        ({"k": 1, "exit_layer": 2}, [2]),
        ({"k": 1, "exit_layer": 3}, []),
        ({"k": 1, "exit_head": "shared"}, []),
    ],
)
def test_layouts_find_the_heads_of_their_boundaries(model: str, settings: dict[str, Any], layers: list[int]) -> None:
    assert sorted(set(layers_of(model, **settings))) == layers


def test_their_borders_are_the_heads_layers_and_guesses_are_among_their_tokens(model: str) -> None:
    with PPDRuntime(model, stages=2, guess_vocab=3, transport="local") as runtime:
        assert runtime.cuts == (2,)
        assert {spec.guess_tokens for spec in runtime._specs} == {(), (0, 7, 299)}


def test_shipped_heads_are_found_where_none_are_kept(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, info = tmp_path / "shipped", describe(model)
    monkeypatch.setattr(kept_heads, "SHIPPED", shipped)
    (shipped / folder_name(info)).mkdir(parents=True)
    make_head(shipped / folder_name(info) / "layer-3", Path(model), AFFINE, 3)
    make_drafter(shipped / folder_name(info) / DRAFTER, model)
    cuts = {"stages": 2, "cuts": (3,), "guess_vocab": 100}
    assert layers_of(model, **cuts) == []
    kept_heads_folder(info).rename(tmp_path / "elsewhere")
    assert layers_of(model, **cuts) == layers_of(model, **cuts, weights="int8") == [3]
    with PPDRuntime(model, stages=1) as runtime:
        assert runtime._specs[0].drafter.folder.is_relative_to(shipped)
    (tmp_path / "ppd_runtime" / "heads").rmdir()
    assert layers_of(model, **cuts) == [3]


def test_stages_take_the_heads_of_their_cuts_from_a_folder_of_several(model: str) -> None:
    folder = kept_heads_folder(describe(model))
    assert layers_of(model, stages=2, exit_head=folder) == [2]
    assert layers_of(model, stages=2, cuts=(1,), exit_head=folder) == [1]
    assert layers_of(model, stages=3, exit_head=folder) == [1, 2]
    with pytest.raises(ValueError, match="was trained for layer 1, behind which there is no boundary"):
        layers_of(model, stages=2, cuts=(3,), exit_head=folder)


def test_other_weights_have_other_heads(model: str, model_folder: ModelFolder) -> None:
    assert layers_of(str(model_folder("llama", num_layers=4, seed=1)), stages=2) == []


def damage(head: Path, how: str) -> None:
    """Spoil a kept head."""
    if how == "no card":
        (head / "exit_head.json").unlink()
    elif how == "another layer":
        shutil.rmtree(head)
        shutil.copytree(head.with_name("layer-3" if head.name == "layer-1" else "layer-1"), head)
    else:
        with (head / "exit_head.safetensors").open("r+b") as file:
            file.truncate(100)


@pytest.mark.parametrize("how", ["no card", "no tensors", "another layer"])
def test_damaged_heads_are_left_aside_with_a_line_and_the_others_stay(
    model: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_heads_folder(describe(model))
    make_head(kept / "layer-3", Path(model), AFFINE, 3)
    assert sorted(layers_of(model, stages=4)) == [1, 2, 3]
    assert not [line for line in caplog.messages if "CPU cores" not in line]
    caplog.clear()
    damage(kept / "layer-1", how)
    assert sorted(layers_of(model, stages=4)) == [2, 3]
    (line,) = [line for line in caplog.messages if "CPU cores" not in line]
    assert line.startswith("the model's own head guesses after layer 1, not the kept one: ")
    assert f"{kept}/layer-1" in line
    assert line.endswith("; run `ppd adapt` for this model again, or give exit_head='shared'")
    assert sorted(layers_of(model, stages=2)) == [2]
    damage(kept / "layer-2", how)
    assert layers_of(model, stages=2) == []
    with PPDRuntime(model, stages=4, transport="local") as runtime:
        assert runtime.cuts == (1, 2, 3)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_one_stage_finds_the_drafter_and_decodes_as_ever(model: str, weights: str | None, tmp_path: Path) -> None:
    make_drafter(kept_heads_folder(describe(model)) / DRAFTER, model)
    make_drafter(tmp_path / "mine", model)
    given = {"weights": weights, "compile": True, "dtype": "float32"}
    ordinary = OrdinaryDecoding(model, **given)
    for drafter in (None, "none", tmp_path / "mine"):
        settings = {"stages": 1, "rows": 4, "drafter": drafter, "speculation": "always", **given}
        with PPDRuntime(model, **settings) as runtime:
            assert (runtime._specs[0].drafter is None) == (drafter == "none")
            for sampling in ({}, {"temperature": 1.0, "seed": 3}):
                asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
                result = runtime.generate("the quick brown fox", **asked)
                assert result.token_ids == ordinary.generate("the quick brown fox", **asked).token_ids
                assert drafter == "none" or result.stats.hits + result.stats.misses == 23
            with ThreadPoolExecutor(3) as pool:
                found = pool.map(
                    lambda prompt: runtime.generate(prompt, max_new_tokens=16).token_ids, ["the", "a", "I"]
                )
                expected = [ordinary.generate(prompt, max_new_tokens=16).token_ids for prompt in ("the", "a", "I")]
                assert list(found) == expected


def test_a_damaged_drafter_is_left_aside_and_one_that_is_named_is_refused(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = kept_heads_folder(describe(model)) / DRAFTER
    make_drafter(folder, model)
    with (folder / "drafter.safetensors").open("r+b") as file:
        file.truncate(100)
    with PPDRuntime(model, stages=1) as runtime:
        assert runtime._specs[0].drafter is None
    line, *_ = caplog.messages
    assert line.startswith("no drafter guesses, for the kept one cannot be used: drafter=")
    with pytest.raises(ValueError, match="drafter.safetensors is not what drafter.json describes"):
        PPDRuntime(model, stages=1, drafter=folder)
    with pytest.raises(ValueError, match=r"drafter.json': is a file, not a drafter's folder; give the folder that it"):
        PPDRuntime(model, stages=1, drafter=folder / "drafter.json")
    with pytest.raises(ValueError, match="drafter=mine: is for the staged layout"):
        PPDRuntime(model, k=1, drafter="mine")
    with pytest.raises(ValueError, match="drafter='mine': model 'mine' is neither a folder here nor"):
        PPDRuntime(model, stages=1, drafter="mine")


@pytest.mark.parametrize("settings", [{"transport": "local"}, {"launcher": "processes", "guess_vocab": 300}])
def test_stages_ask_the_drafter_with_the_states_of_certain_tokens(model: str, settings: dict[str, Any]) -> None:
    folder = kept_heads_folder(describe(model)) / DRAFTER
    make_drafter(folder, model)
    ordinary = OrdinaryDecoding(model)
    with PPDRuntime(model, stages=2, speculation="always", exit_head="shared", **settings) as runtime:
        assert [spec.drafter is not None for spec in runtime._specs] == [True, True]
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
            expected = ordinary.generate("the quick brown fox", **asked).token_ids
            assert runtime.generate("the quick brown fox", **asked).token_ids == expected


def test_a_drafter_of_other_tokens_is_left_aside_or_refused(model: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = kept_heads_folder(describe(model)) / DRAFTER
    make_drafter(folder, model)
    with PPDRuntime(model, stages=2, guess_vocab=7, transport="local") as runtime:
        assert not any(spec.drafter for spec in runtime._specs)
    assert "no drafter guesses: the kept one names other tokens than guess_vocab has" in caplog.messages
    with pytest.raises(ValueError, match="names 100 tokens, others than stages guess among; give guess_vocab=100"):
        PPDRuntime(model, stages=2, guess_vocab=7, drafter=folder)
    with pytest.raises(ValueError, match="drafter_device='cpu' with drafter='.*', which is no model: it runs beside"):
        PPDRuntime(model, stages=2, drafter=folder, drafter_device="cpu", transport="local")


def test_one_stage_keeps_to_a_guess_vocab_or_refuses_it(model: str, model_folder: ModelFolder, tmp_path: Path) -> None:
    """A draft model guesses among its tokens; other drafters have tokens of their own, and nothing else has a head."""
    (tmp_path / "counts.json").write_text(json.dumps({"7": 2, "299": 1}))
    counted = {"guess_vocab": 3, "guess_counts": tmp_path / "counts.json"}
    draft = model_folder("mistral", num_layers=2, seed=5)
    with PPDRuntime(model, stages=1, drafter=draft, **counted) as runtime:
        assert runtime._specs[0].drafter.tokens == (0, 7, 299)
    line = r"^guess_vocab=3 with stages=1: one stage has no boundaries, and {}; drop guess_vocab and guess_counts$"
    with pytest.raises(ValueError, match=line.format("no drafter is asked")):
        PPDRuntime(model, stages=1, **counted)
    make_drafter(kept_heads_folder(describe(model)) / DRAFTER, model)
    with pytest.raises(ValueError, match=line.format("its drafter names 100 tokens of its own")):
        PPDRuntime(model, stages=1, **counted)
    for size in (100, 300):
        PPDRuntime(model, stages=1, guess_vocab=size).close()


def test_the_papers_layout_exits_where_there_is_a_head(
    model: str, model_folder: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one nearest behind half depth, within an eighth of it; its tokens are ordinary decoding's."""
    ordinary, kept = OrdinaryDecoding(model), kept_heads_folder(describe(model))
    for exit_head in (None, kept):
        settings = {"k": 2, "exit_head": exit_head, "guess_vocab": 100, "speculation": "always", "transport": "local"}
        with PPDRuntime(model, **settings) as runtime:
            assert runtime.exit_layer == 2
            assert [isinstance(spec.exit_head, HeadInfo) for spec in runtime._specs] == [True] * 3
            for sampling in ({}, {"temperature": 1.0, "seed": 3}):
                asked = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
                expected = ordinary.generate("the quick brown fox", **asked).token_ids
                assert runtime.generate("the quick brown fox", **asked).token_ids == expected
    with pytest.raises(ValueError, match="has heads for the layers 1, 2: give one of them as exit_layer"):
        PPDRuntime(model, k=1, exit_layer=3, exit_head=kept)
    deep = model_folder("llama", num_layers=16)
    (tmp_path / "deep").mkdir()
    for layer in (9, 11):
        make_head(tmp_path / "deep" / f"layer-{layer}", deep, AFFINE, layer)
    with PPDRuntime(deep, k=1, exit_head=tmp_path / "deep", transport="local") as runtime:
        assert runtime.exit_layer == 9
    with PPDRuntime(deep, k=1, exit_head=tmp_path / "deep" / "layer-11", transport="local") as runtime:
        assert runtime.exit_layer == 11
