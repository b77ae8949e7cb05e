"""What a drafter adds to its process, compared with what it takes once it is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import save_model
from published_heads import card_of, tensors_of, write_head
from safetensors.torch import load_file, save_file

from ppd_runtime import RuntimeConfig
from ppd_runtime.launch import cache_room
from ppd_runtime.launch.gpu_memory import FoundGpu, check_shares
from ppd_runtime.launch.memory_needs import drafter_needs, layer_entry_bytes, whole_weight_bytes
from ppd_runtime.launch.worker_specs import worker_specs
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers, weight_bytes
from ppd_runtime.models.named_drafter import describe_named, load_named
from ppd_runtime.workers.spec import WorkerSpec

ModelFolder = Callable[..., Path]
LAYERS, TOKENS = 8, 9


def specs_of(model: Path, drafter: object, **settings: Any) -> list[WorkerSpec]:
    """Two stages, which the drafter is asked by."""
    given = {"dtype": "float32", "stages": 2, "rows": 1, "max_cache_tokens": 50, "prefix_cache_tokens": 0, **settings}
    config = RuntimeConfig(model, drafter=str(drafter), **given)
    return worker_specs(config, "processes", describe(str(model)), LAYERS // 2, {}, None)


def check(model: Path, drafter: object) -> None:
    """Compare the first stage's need with a loaded drafter's parameters that are not the model's, and its entries."""
    first = specs_of(model, drafter)[1]
    info, needs = describe(str(model)), drafter_needs(first)
    whole = load_layers(info, info.num_layers, torch.float32, "cpu")
    loaded = load_named(describe_named(str(drafter), info), whole, info, None)
    loaded.begin(2 * TOKENS)
    layers = max(1, len(describe_named(str(drafter), info).layers))
    loaded.follow(list(range(TOKENS)), torch.zeros(TOKENS, layers, whole.config.hidden_size))
    ours = {tensor.data_ptr() for tensor in whole.state_dict().values()}
    own = {tensor.data_ptr(): tensor for tensor in loaded._network.state_dict().values()}
    assert needs.weights == sum(tensor.nbytes for place, tensor in own.items() if place not in ours)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in loaded._cache.layers)
    assert needs.of_token * TOKENS == kept
    assert needs.device == "cpu"


@pytest.fixture
def target(model_folder: ModelFolder) -> Path:
    return model_folder("llama", num_layers=LAYERS)


@pytest.mark.parametrize("left_out", [(), ("embed_tokens.weight", "lm_head.weight")])
@pytest.mark.parametrize("size", [100, 300])
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_published_head(target: Path, tmp_path: Path, kind: str, size: int, left_out: tuple[str, ...]) -> None:
    card = card_of(kind, target, draft_vocab_size=size)
    write_head(tmp_path, card, tensors_of(card))
    given = {name: part for name, part in load_file(tmp_path / "model.safetensors").items() if name not in left_out}
    save_file(given, tmp_path / "model.safetensors")
    check(target, tmp_path)


def test_a_models_own_layer(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    for name, layers in (("model", LAYERS), ("longer", LAYERS + 1)):
        save_model(tmp_path / name, "glm4_moe", num_layers=layers, **experts)
    file, place = tmp_path / "model" / "model.safetensors", f"model.layers.{LAYERS}."
    tensors, longer = load_file(file), load_file(tmp_path / "longer" / "model.safetensors")
    tensors |= {name: tensor for name, tensor in longer.items() if name.startswith(place)}
    tensors |= {f"{place}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"{place}eh_proj.weight": torch.zeros(32, 64)}
    tensors |= {f"{place}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    check(tmp_path / "model", "mtp")


def test_a_draft_model_beside_the_first_stage_and_in_its_own_process(
    target: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = model_folder("mistral", num_layers=2, seed=5, hidden_size=64)
    info, config = describe(str(draft)), model_config(draft)
    weights, of_token = (draft / "model.safetensors").stat().st_size, 2 * layer_entry_bytes(config, torch.float32)
    first = specs_of(target, draft)[1]
    assert drafter_needs(first).weights == pytest.approx(weights, rel=0.01)
    assert drafter_needs(first).of_token == of_token
    apart = specs_of(target, draft, drafter_device="cpu")
    assert [drafter_needs(spec).weights for spec in apart] == [0, 0, 0]
    ours = describe(str(target))
    needed = [whole_weight_bytes(one, model_config(one.folder), torch.float32) for one in (ours, info)]
    entries = LAYERS * layer_entry_bytes(model_config(target), torch.float32) + of_token
    monkeypatch.setattr(cache_room, "_free_bytes", lambda device: sum(needed) + 2 * entries * 10_000)
    for specs in (apart, specs_of(target, draft)):
        assert cache_room.cache_room(specs, are_here=True) == pytest.approx(10_000, abs=1)


@pytest.mark.usefixtures("gpu_seen")
def test_gpus_have_room_for_it(target: Path, tmp_path: Path) -> None:
    """Its weights, and its entries of all requests' tokens, on the first stage's GPU alone."""
    card = card_of("eagle3", target)
    write_head(tmp_path, card, tensors_of(card))
    specs, info = specs_of(target, tmp_path, device="cuda"), describe(str(target))
    config = RuntimeConfig(target, stages=2, max_cache_tokens=50, prefix_cache_tokens=0)
    needs = drafter_needs(specs[1])
    assert needs.device == specs[1].device
    for spec, beside in zip(specs, (0, needs.weights + 50 * needs.of_token), strict=True):
        layers = spec.num_layers - spec.first_layer
        needed = weight_bytes(info, spec.first_layer, spec.num_layers, torch.float32) + beside
        needed += 50 * layers * layer_entry_bytes(model_config(target), torch.float32)
        check_shares(specs, {spec.rank: FoundGpu("0", needed)}, config)
        with pytest.raises(ValueError, match="a worker needs"):
            check_shares(specs, {spec.rank: FoundGpu("0", needed - 1)}, config)
