"""How much the staged layout takes at once where nothing says so: by the memory that there is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families.specimens import Specimen
from heads_for_tests import make_drafter
from models_for_tests import build_tokenizer

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch import cache_room
from ppd_runtime.launch.memory_needs import layer_entry_bytes, whole_weight_bytes
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.stage.paired import counting_layers


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "phi3", "cohere2", "longcat_flash"])
def test_a_tokens_entries_are_as_large_as_the_librarys(family: str) -> None:
    model = Specimen(family).build()
    layers = model(torch.tensor([[5]]), use_cache=True).past_key_values.layers
    config = counting_layers(model.config)
    attentions = len(layers) // config.num_hidden_layers
    found = {attentions * (layer.keys.nbytes + layer.values.nbytes) for layer in layers}
    assert found == {layer_entry_bytes(config, torch.float32)}


def test_unlike_layers_count_as_the_largest() -> None:
    """A latent of 24 numbers, a rotary part of 8, and a key of 16 for an index, which is in float32."""
    config = Specimen("dots3_note_text").config()
    assert layer_entry_bytes(config, torch.float32) == 4 * (24 + 8 + 16)
    assert layer_entry_bytes(config, torch.bfloat16) == 2 * (24 + 8) + 4 * 16


def test_room_is_half_of_what_the_weights_leave_free(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama", num_layers=4)
    weights = (folder / "model.safetensors").stat().st_size
    specs = PPDRuntime(folder, stages=2, transport="local", dtype="float32")._specs
    entries = 4 * layer_entry_bytes(Specimen("llama").config(), torch.float32)
    monkeypatch.setattr(cache_room, "_free_bytes", lambda device: weights + 2 * entries * 10_000)
    here = cache_room.cache_room(specs, are_here=True)
    assert here == pytest.approx(10_000, rel=0.01)
    assert cache_room.requests_for(here) == 9
    monkeypatch.setattr(cache_room, "_free_bytes", lambda device: 0)
    assert cache_room.cache_room(specs, are_here=True) == 2048
    monkeypatch.setattr(cache_room, "_free_bytes", lambda device: 2**60)
    assert cache_room.cache_room(specs, are_here=True) == 2**20
    assert cache_room.cache_room(specs, are_here=False) is None


def test_a_drafter_takes_its_part_of_the_room(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = model_folder("llama", num_layers=4)
    drafter = make_drafter(tmp_path / "drafter", str(folder))
    given = {"stages": 2, "transport": "local", "dtype": "float32", "guess_vocab": 300}
    rooms = []
    for named in ("none", str(drafter.folder)):
        with PPDRuntime(folder, drafter=named, **given) as runtime:
            monkeypatch.setattr(cache_room, "_free_bytes", lambda device: 30_000_000)
            rooms.append(cache_room.cache_room(runtime._specs, are_here=True))
    entries = 4 * layer_entry_bytes(Specimen("llama").config(), torch.float32)
    left = rooms[0] * entries - drafter.num_bytes("cpu") / 2
    assert rooms[1] == pytest.approx(left / (entries + drafter.entry_bytes), abs=1)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_of_few_bits_count_as_what_they_take(
    model_folder: Callable[..., Path], family: str, weights: str
) -> None:
    folder = str(model_folder(family, num_layers=3))
    loaded = OrdinaryDecoding(folder, weights=weights, dtype="float32").stage.model
    held = sum({tensor.data_ptr(): tensor.nbytes for tensor in loaded.parameters()}.values())
    info = describe(folder, weights)
    assert whole_weight_bytes(info, model_config(info.folder), torch.float32) == held


def test_a_runtime_has_room_by_default_and_as_it_is_told(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", num_layers=4)
    usual = PPDRuntime(folder, stages=2, transport="local")
    assert 1 <= usual.max_requests <= 16
    with pytest.raises(ValueError, match=r"more than (the model's \d+ positions|max_cache_tokens=)"):
        usual.generate([5, 9], max_new_tokens=2**21)
    assert PPDRuntime(folder, stages=2, transport="local", max_cache_tokens=3000).max_requests == 2
    assert PPDRuntime(folder, stages=2, transport="local", max_cache_tokens=20, max_requests=5).max_requests == 5
    assert PPDRuntime(folder, k=2, transport="local").max_requests == 1


def test_states_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tokens in flight with each request, those of kept chunks of prompts at all times."""
    Specimen("qwen3_next").build().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    rooms = []
    for settings in ({}, {"rows": 9}, {"prefix_cache_tokens": 0}):
        given: dict[str, Any] = {"stages": 2, "rows": 1, "k": 1, "transport": "local", "dtype": "float32", **settings}
        specs = PPDRuntime(tmp_path, **given)._specs
        monkeypatch.setattr(cache_room, "_free_bytes", lambda device: 30_000_000)
        rooms.append(cache_room.cache_room(specs, are_here=True))
    states, entries = 4 * 1024.0, 2 * layer_entry_bytes(model_config(tmp_path), torch.float32)
    usual, rowed, unkept = (entries + states * flight / 1024 for flight in (4, 20, 4))
    assert rooms[0] * usual == pytest.approx(rooms[1] * rowed, rel=1e-3)
    assert rooms[2] * unkept - rooms[0] * usual == pytest.approx(states * 8192 / 128 / 2, abs=2 * usual)
