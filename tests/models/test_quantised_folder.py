"""Folders of `ppd quantize`: they give the text that the setting gives their model, and what is wrong is one line."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import ppd, printed, refused
from heads_for_tests import make_head, write_texts
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint import quantised
from ppd_runtime.models.checkpoint.config import QUANTISED, QUANTISED_CARD
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.checkpoint.quantised import packed_tensors
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.native.packing import LAYOUT
from ppd_runtime.models.stage.slicing import LayerSet
from ppd_runtime.models.trained.heads import describe_head
from ppd_runtime.models.trained.layer_sets import read_layer_set, write_layer_set
from ppd_runtime.training.exit_head import ExitHeadRun, HeadRecipe

ModelFolder = Callable[..., Path]


@pytest.fixture
def int8_folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    quantise_model(str(model_folder("llama")), tmp_path / "out", "int8")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("family", "weights", "settings"),
    [("llama", "int8", {"dtype": "bfloat16", "max_shard_size": "100KB"}), ("qwen2", "int4", {"tied": True})],
)
def test_a_folder_gives_the_text_of_the_setting(model_folder, tmp_path, monkeypatch, family, weights, settings):
    folder, out = model_folder(family, num_layers=4, **settings), tmp_path / "out"
    quantise_model(str(folder), out, weights)
    info, given = describe(str(out)), describe(str(folder), weights)
    ours, theirs = (load_layers(one, 4, torch.float32, "cpu").state_dict() for one in (info, given))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert packed_tensors(info, 2).keys() == packed_tensors(given, 2).keys()
    expected = texts(OrdinaryDecoding(folder, weights=weights))
    monkeypatch.setattr(quantised, "quantise", lambda *_: pytest.fail("quantised at a start"))
    assert texts(OrdinaryDecoding(out)) == texts(OrdinaryDecoding(out, weights=weights)) == expected
    with PPDRuntime(out, transport="local", stages=3) as runtime:
        assert texts(runtime) == expected


def test_the_command_writes_a_folder_with_a_card(model_folder: ModelFolder, tmp_path: Path) -> None:
    folder, out = model_folder("llama"), tmp_path / "out"
    done = ppd("quantize", folder, out, "--weights", "int4", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    card = json.loads((out / QUANTISED_CARD).read_text())
    assert card == {"format": LAYOUT, **json.loads(done.stdout)}
    assert (card["weights"], card["head"], card["source"]) == ("int4", "int8", str(folder))
    assert card["source_fingerprint"] == model_fingerprint(describe(str(folder)))
    assert {path.name for path in folder.iterdir()} - {path.name for path in out.iterdir()} == {"model.safetensors"}
    assert (out / QUANTISED).stat().st_size < 0.5 * (folder / "model.safetensors").stat().st_size
    told = printed("quantize", folder, tmp_path / "out8", "--weights", "int8")
    assert told.startswith(f"{tmp_path / 'out8'}: {folder} with int8 weights, ")


def test_parts_of_the_model_serve_the_folder(model_folder: ModelFolder, int8_folder: Path, tmp_path: Path) -> None:
    folder, other = model_folder("llama"), model_folder("llama", seed=1)
    left_out = LayerSet((1,), (2,))
    for model, fits in ((folder, True), (int8_folder, True), (other, False)):
        head = tmp_path / f"head-{model.name}-{fits}"
        found = tmp_path / f"set-{model.name}-{fits}"
        if model != int8_folder:
            make_head(head, model, "affine", 2)
        write_layer_set(found, left_out, describe(str(model)), {})
        info = describe(str(int8_folder))
        if fits:
            assert read_layer_set(found, info) == left_out
            assert model == int8_folder or describe_head(head, info).exit_layer == 2
            continue
        with pytest.raises(ValueError, match="was trained for layer 2 of model"):
            describe_head(head, info)
        with pytest.raises(ValueError, match="was found for model"):
            read_layer_set(found, info)
    with pytest.raises(ValueError, match="was found for model"):  # what suits other numbers need not suit the model's
        read_layer_set(tmp_path / f"set-{int8_folder.name}-True", describe(str(folder)))


@pytest.mark.parametrize("demand", ["exists", "dangling link", "no such folder", "narrow", "experts", "gptq", "cut"])
def test_what_cannot_be_written_is_one_line(model_folder: ModelFolder, tmp_path: Path, demand: str) -> None:
    out, model = tmp_path / "place" / "out", tmp_path / "model"
    out.parent.mkdir()
    family = "qwen3_moe" if demand == "experts" else "llama"
    shutil.copytree(model_folder(family, hidden_size=48 if demand == "narrow" else 32), model)
    if demand == "gptq":
        config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
        (model / "config.json").write_text(json.dumps(config))
    elif demand == "cut":
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif demand == "exists":
        out.mkdir()
    elif demand == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    elif demand == "no such folder":
        out = out.parent / "none" / "out"
    before = sorted(tmp_path.rglob("*"))
    line = refused("quantize", model, out, "--weights", "int4")
    reason = {
        "exists": "exists; give a folder that is not there yet",
        "dangling link": "exists; give a folder that is not there yet",
        "no such folder": "give a folder in one that exists",
        "narrow": "has 48 inputs, no multiple of 32; leave weights out",
        "experts": "has stacked experts",
        "gptq": "its weights are quantised by gptq with bits=None, not read; give the model that it was made of",
        "cut": "model.safetensors cannot be read: it is cut short",
    }[demand]
    assert reason in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_takes_no_more_leaves_nothing(model_folder: ModelFolder, tmp_path: Path, monkeypatch) -> None:
    folder = str(model_folder("llama"))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(ValueError, match="out: File too large; give a file that can be written"):
            quantise_model(folder, tmp_path / "out", "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 5_000, 5_000))
    with pytest.raises(ValueError, match=r"out: needs [\d.]+e-05 GB, and 5e-06 GB are free there"):
        quantise_model(folder, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())


def test_a_folder_has_one_format_for_good(int8_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights='int4': model .* has int8 ones, made of .*; leave weights out"):
        PPDRuntime(int8_folder, weights="int4")
    with pytest.raises(ValueError, match="dtype='bfloat16' with weights='int8'"):
        OrdinaryDecoding(int8_folder, dtype="bfloat16")
    with pytest.raises(ValueError, match="has int8 weights already, made of"):
        quantise_model(str(int8_folder), tmp_path / "again", "int8")
    data = str(write_texts(tmp_path / "texts.jsonl"))
    with pytest.raises(ValueError, match="has int8 weights; train the model they were made of"):
        ExitHeadRun(str(int8_folder), data, HeadRecipe(exit_layer=2), tmp_path / "head")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "no card", "format", "field"])
def test_a_damaged_folder_is_one_line(int8_folder: Path, damage: str) -> None:
    weights, card = int8_folder / QUANTISED, int8_folder / QUANTISED_CARD
    content, fields = bytearray(weights.read_bytes()), json.loads(card.read_text())
    content[-5000] ^= 1
    {
        "a bit": lambda: weights.write_bytes(content),
        "cut": lambda: weights.write_bytes(content[:-64]),
        "gone": weights.unlink,
        "no card": lambda: card.write_text("[]"),
        "format": lambda: card.write_text(json.dumps(fields | {"format": LAYOUT + 1})),
        "field": lambda: card.write_text(json.dumps(fields | {"weights": "int3"})),
    }[damage]()
    reason = {
        "a bit": "is not what ppd_weights.json describes; quantise the model again",
        "cut": "is not what ppd_weights.json describes; quantise the model again",
        "gone": "lacks ppd-weights.safetensors",
        "no card": "ppd_weights.json holds no JSON object",
        "format": "another version wrote it",
        "field": "another version wrote it",
    }[damage]
    with pytest.raises(ValueError, match=reason) as caught:
        OrdinaryDecoding(int8_folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=reason), PPDRuntime(int8_folder, transport="local", k=1):
        pass
