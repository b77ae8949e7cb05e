"""Workers that do not fit on their GPUs are refused before anything is loaded, with what is needed and what is free."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from heads_for_tests import make_drafter, make_head
from transformers import PreTrainedModel

from ppd_runtime import PPDRuntime, RuntimeConfig
from ppd_runtime.launch import startup
from ppd_runtime.launch.gpu_memory import FoundGpu, check_shares
from ppd_runtime.launch.memory_needs import layer_entry_bytes
from ppd_runtime.launch.worker_specs import worker_specs
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.config import model_config
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import weight_bytes
from ppd_runtime.models.trained.heads import KINDS, load_head


@pytest.mark.usefixtures("gpu_seen")
@pytest.mark.parametrize(("first", "layers"), [(0, 4), (2, 4)])
def test_a_gpu_without_room_is_named_with_both_numbers(
    model_folder: Callable[..., Path], first: int, layers: int
) -> None:
    """Before anything is loaded; the need is the memory that a stage of these layers has on a CPU."""
    info = describe(str(model_folder("llama", hidden_size=256)))
    model = load_stage(info, layers, torch.float32, "cpu", first=first).model
    held = [
        w
        for name, w in model.named_parameters()
        if not (first and (name.startswith(("model.layers.0.", "model.layers.1.", "model.embed"))))
    ]
    needed = sum(w.numel() * w.element_size() for w in held) / 1e9
    line = rf"^device='cuda:1': layers {first + 1} to 4 of .* in float32 need {needed:.2f} GB and 0.00 GB are free: .*$"
    with pytest.raises(ValueError, match=line):
        load_stage(info, layers, torch.float32, "cuda:1", first=first)


@pytest.mark.usefixtures("gpu_seen")
def test_workers_that_fit_alone_and_not_together_are_refused(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any is loaded: their weights, their boundaries' heads, and what they keep of keys and values."""
    folder, free = model_folder("llama", hidden_size=256), [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 10**9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = {"device": "cuda", "dtype": "float32", "launcher": "processes"}
    stages = {"stages": 2, "cuts": "2", "rows": 1, "max_cache_tokens": 1000, "prefix_cache_tokens": 0}
    for layout, kept in (({"k": 1}, 0), (stages, 1000), (stages | {"guess_vocab": 7}, 1000)):
        runtime = PPDRuntime(folder, **layout, **settings)
        specs, info = runtime._specs, describe(str(folder))
        loaded = [load_stage(info, s.num_layers, s.dtype, "cpu", None, s.first_layer, s.guess_tokens) for s in specs]
        entries = 0
        for spec, stage in zip(specs, loaded, strict=True):
            stage.begin(64)
            states = torch.zeros(1, 1, 256)
            stage.run(spec.first_layer, spec.num_layers, states if spec.first_layer else [0], 0)
            held = [layer for layer in stage.cache.layers if layer.rows]
            entries += kept * sum(rows[0].nbytes for layer in held for rows in layer.rows)
        weights = sum(_held(stage.model) for stage in loaded)
        needed, alone = (weights + entries) / 1e9, max(_held(stage.model) for stage in loaded)
        free[0] = needed_bytes = weights + entries
        startup.check_gpus(specs, runtime.config)
        free[0] = needed_bytes - 1
        assert alone < free[0]
        line = (
            rf"^device='cuda:0': 2 workers need {needed:.2f} GB there \({weights / 1e9:.2f} of weights, "
            rf"{entries / 1e9:.2f} of keys and values\) and {needed:.2f} GB are free: choose fewer workers .*$"
        )
        with pytest.raises(ValueError, match=line):
            startup.prepare(specs, replace(runtime.config, compile=True), "processes", pytest.fail)
        runtime.close()


@pytest.mark.usefixtures("gpu_seen")
def test_the_drafter_counts_where_it_is_asked(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Its weights, and its entries of all requests' tokens, on the first stage's GPU alone."""
    info = describe(str(model_folder("llama")))
    drafter = make_drafter(tmp_path / "drafter", str(info.folder), range(300))
    given = {"stages": 2, "cuts": "2", "rows": 1, "max_cache_tokens": 100, "prefix_cache_tokens": 0, "guess_vocab": 300}
    config = RuntimeConfig(drafter=str(drafter.folder), device="cuda", dtype="float32", **given)
    entries = 100 * 2 * layer_entry_bytes(model_config(info.folder), torch.float32)
    beside = [0, drafter.num_bytes("cuda") + 100 * drafter.entry_bytes]
    specs = worker_specs(config, "processes", info, 2, {}, None)
    for spec, drafts in zip(specs, beside, strict=True):
        needed = weight_bytes(info, spec.first_layer, spec.num_layers, torch.float32) + entries + drafts
        check_shares(specs, {spec.rank: FoundGpu("0", needed)}, config)
        with pytest.raises(ValueError, match="a worker needs"):
            check_shares(specs, {spec.rank: FoundGpu("0", needed - 1)}, config)


@pytest.mark.usefixtures("gpu_seen")
def test_stages_on_gpus_of_their_own_are_counted_as_they_have_been_cut(model_folder: Callable[..., Path]) -> None:
    info = describe(str(model_folder("llama", hidden_size=256)))
    config = RuntimeConfig(stages=2, cuts="1", rows=1, prefix_cache_tokens=0, device="cuda", dtype="float32")
    specs = worker_specs(config, "processes", info, 2, {}, None)
    line = r"^device='cuda:[01]': a worker needs .* and 0.00 GB are free: choose fewer workers .*$"
    with pytest.raises(ValueError, match=line):
        startup.prepare(specs, config, "processes", lambda line: None)


def test_workers_of_ray_are_counted_by_the_gpu_that_each_has_come_to(model_folder: Callable[..., Path]) -> None:
    """GPUs of two hosts have the same number; the smaller of two answers about one is what is free there."""
    info = describe(str(model_folder("llama")))
    config = RuntimeConfig(k=2, device="cuda", dtype="float32", bind_interface="10.0.0.1")
    specs = worker_specs(config, "ray", info, 2, {}, None)
    whole, half = (weight_bytes(info, 0, layers, torch.float32) for layers in (4, 2))
    places = {0: ("1", whole, "a"), 1: ("1", half, "b"), 2: ("0", half, "a")}
    check_shares(specs, {rank: FoundGpu(*place) for rank, place in places.items()}, config)
    places |= {2: ("1", whole + half, "a")}
    line = (
        rf"^device='cuda:1' of a: 2 workers need .*, 0.00 of keys and values\) and {whole / 1e9:.2f} GB are free: .*$"
    )
    with pytest.raises(ValueError, match=line):
        check_shares(specs, {rank: FoundGpu(*place) for rank, place in places.items()}, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [(), (3, 5, 9)])
def test_a_trained_heads_share_of_that_is_what_it_holds(
    model_folder: Callable[..., Path], tmp_path: Path, kind: str, tokens: tuple[int, ...]
) -> None:
    folder = model_folder("llama")
    head, info = make_head(tmp_path, folder, kind, 2), describe(str(folder))
    loaded = load_head(head, load_stage(info, 2, torch.float32, "cpu", head_tokens=tokens).model, tokens)
    assert head.num_weights(len(tokens)) == sum(w.numel() for w in loaded.parameters())


def _held(model: PreTrainedModel) -> int:
    """The bytes that a model has memory for; those of absent layers are one number, shown again and again."""
    return sum(w.nbytes for w in model.parameters() if 0 not in w.stride())
