"""Files whose tensors have other names than the model's, as a base model's have: floats and packed open alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.specimens import Specimen
from models_for_tests import build_model, build_tokenizer
from safetensors.torch import load_file, save_file
from two_texts import texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint import loading, weight_cache
from ppd_runtime.models.checkpoint.config import weight_files
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.loading import bfloat16_weights, load_layers, weight_bytes, weight_copies
from ppd_runtime.models.checkpoint.names import names_in_model
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.checkpoint.weight_cache import map_tensors

NUM_LAYERS = 4
Saved = Callable[..., tuple[Path, Path]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A model in a folder, and its base alone in another one, whose tensors lack the names' beginning."""

    def save(sharded: bool = False, **settings: Any) -> tuple[Path, Path]:
        model = build_model("llama", num_layers=NUM_LAYERS, tied=True, **settings)
        plain, odd = tmp_path / "plain", tmp_path / "odd"
        model.save_pretrained(plain)
        model.model.save_pretrained(odd, max_shard_size="40KB" if sharded else "5GB")
        for folder in (plain, odd):
            build_tokenizer().save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
        return plain, odd

    return save


@pytest.mark.parametrize(
    ("weights", "sharded", "layout"), [(None, True, {"k": 1}), ("int8", False, {"stages": 2}), ("int4", True, {"k": 1})]
)
def test_a_base_models_files_open_in_every_format(
    saved: Saved, weights: str | None, sharded: bool, layout: dict[str, int]
) -> None:
    plain, odd = saved(sharded=sharded)
    assert not any(name.startswith("model.") for path in weight_files(odd) for name in load_file(path))
    info, other = describe(str(odd), weights), describe(str(plain), weights)
    for first, last in ((0, NUM_LAYERS), (1, 3)):
        ours, theirs = (load_layers(one, last, torch.float32, "cpu", first).state_dict() for one in (info, other))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert weight_bytes(info, first, last, torch.float32) == weight_bytes(other, first, last, torch.float32)
    expected = texts(OrdinaryDecoding(plain, weights=weights))
    assert texts(OrdinaryDecoding(odd, weights=weights)) == expected
    with PPDRuntime(odd, weights=weights, transport="local", **layout) as runtime:
        assert texts(runtime) == expected


def test_a_folder_is_quantised_from_a_base_models_files(saved: Saved, tmp_path: Path) -> None:
    plain, odd = saved(sharded=True)
    quantise_model(str(odd), tmp_path / "out", "int4")
    assert texts(OrdinaryDecoding(tmp_path / "out")) == texts(OrdinaryDecoding(plain, weights="int4"))


def test_only_the_layers_asked_for_are_read(saved: Saved) -> None:
    """As of files with the model's names."""
    read = [sorted(loading._read_tensors(describe(str(folder)), 3, None, 1)) for folder in saved()]
    assert len(read[0]) == 2 + 2 * 9, "the embedding, the norm and two layers"
    assert read[1] == [name.removeprefix("model.") for name in read[0]]


def test_copies_have_the_order_of_a_pass_and_the_models_names(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(weight_cache, "SETTLED_S", -1.0)
    plain, odd = (describe(str(folder)) for folder in saved(dtype="bfloat16"))
    orders = []
    for info in (plain, odd):
        (copy,) = weight_copies(info, torch.float32).values()
        orders.append([names_in_model(info.folder, info.num_layers)(name) for name, _ in map_tensors(copy)])
    assert orders[0] == orders[1] == list(load_layers(plain, NUM_LAYERS, torch.float32, "cpu").state_dict())[:-1]
    ours, theirs = bfloat16_weights(odd, 2), bfloat16_weights(plain, 2)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert "model.layers.1.mlp.up_proj.weight" in ours
    assert "model.layers.2.mlp.up_proj.weight" not in ours


def test_fingerprints_tell_a_base_models_files_apart(saved: Saved, tmp_path: Path) -> None:
    _, odd = saved()
    before = model_fingerprint(describe(str(odd)))
    file = odd / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, {"format": "pt"})
    assert model_fingerprint(describe(str(odd))) == before
    tensors["layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    assert model_fingerprint(describe(str(odd))) != before


@pytest.mark.parametrize("weights", [None, "int8"])
def test_what_a_base_models_files_lack_is_one_line(saved: Saved, weights: str | None) -> None:
    _, odd = saved()
    tensors = load_file(odd / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, odd / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        OrdinaryDecoding(odd, weights=weights)
    assert "\n" not in str(caught.value)


def test_experts_that_cannot_be_stacked_are_one_line(tmp_path: Path) -> None:
    """transformers' own error tells of a report that nobody sees, and of no model."""
    Specimen("mixtral").build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    odd = next(name for name in tensors if ".experts.1." in name)
    tensors[odd] = torch.cat([tensors[odd], tensors[odd]])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refused = rf"^model '{tmp_path}': its files have tensors that cannot be stacked, such as experts of [^\n]*again$"
    with pytest.raises(ValueError, match=refused):
        OrdinaryDecoding(tmp_path)
