"""Kangaroo's adapter: a model of one layer that a stage runs, and its training."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from heads_for_tests import write_texts
from models_for_tests import FAMILIES, SLIDING_WINDOW, build_model, load_stage
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.adapter import describe_adapter, load_adapter, new_adapter
from ppd_runtime.training.adapter import AdapterRecipe, AdapterRun, AdapterTraining

ModelFolder = Callable[..., Path]
QUICK = AdapterRecipe(exit_layer=1, learning_rate=0.01, batch_size=4, max_length=24, epochs=9, max_steps=10)


def states(tokens: int = 17, dtype: torch.dtype = torch.float32) -> Tensor:
    """Hidden states of some tokens."""
    return torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def run_on(
    model: Path, data: Path, recipe: AdapterRecipe = QUICK, out: str = "adapter", dtype: str = "float32"
) -> AdapterRun:
    return AdapterRun(str(model), str(data), recipe, data.parent / out, dtype)


def attention_alone(model: PreTrainedModel, exit_layer: int, hidden: Tensor) -> Tensor:
    """Logits of transformers' own model with one layer that has no MLP to speak of."""
    layer = model.model.layers[exit_layer]
    layer.mlp.down_proj.weight.zero_()
    layer.self_attn.layer_idx = 0
    model.model.layers = torch.nn.ModuleList([layer])
    model.model.config.num_hidden_layers = model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.model.config.layer_types = model.config.layer_types[exit_layer : exit_layer + 1]
    return model(inputs_embeds=hidden, use_cache=False).logits


@pytest.mark.parametrize(("family", "exit_layer"), list(zip(FAMILIES, cycle([1, 2]), strict=False)))
@torch.no_grad()
def test_a_new_adapter_is_the_next_layers_attention(family: str, exit_layer: int) -> None:
    """Run token by token over its own cache, behind any kind of layer; the text is longer than the windows."""
    model = build_model(family)
    stage = LayerRange(new_adapter(model, exit_layer))
    assert (stage.num_layers, stage.cache.layers[0].sliding_window in (None, SLIDING_WINDOW)) == (1, True)
    stage.begin(17)
    hidden = states()
    pieces = [stage.run(0, 1, hidden[:, first:last], first) for first, last in ((0, 9), (9, 10), (10, 12), (12, 17))]
    logits = stage.head(torch.cat(pieces, dim=1))
    expected = attention_alone(model, exit_layer, hidden)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.allclose(stage.logits(pieces[-1]), expected[0, -1], atol=1e-4)


def test_dropped_entries_leave_no_trace(model_folder: ModelFolder) -> None:
    stage, hidden = LayerRange(new_adapter(load_stage(model_folder("mistral")).model, 2)), states()
    stage.begin(20)
    stage.run(0, 1, hidden[:, :10], 0)
    expected = stage.run(0, 1, hidden[:, 10:12], 10)
    stage.truncate(10)
    stage.run(0, 1, hidden[:, 12:17], 10)
    stage.truncate(10)
    assert torch.equal(stage.run(0, 1, hidden[:, 10:12], 10), expected)


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("llama", ["input_layernorm"]),
        ("gemma2", ["input_layernorm", "post_attention_layernorm"]),
        ("olmo2", ["post_attention_layernorm"]),
    ],
)
def test_norms_that_serve_the_mlp_alone_are_gone(family: str, norms: list[str]) -> None:
    adapter = new_adapter(build_model(family), 2)
    names = {name.removesuffix(".weight") for name in adapter.model.state_dict()}
    assert {name for name in names if "self_attn" not in name} == {"norm", *(f"layers.0.{norm}" for norm in norms)}
    assert not any("mlp" in name or "embed" in name for name in names)
    assert all(parameter.grad is None for parameter in adapter.parameters())


def test_the_model_itself_stays_as_it_is(model_folder: ModelFolder) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("gemma2")).eval()
    ids = torch.tensor([[5, 3, 8, 1, 9, 12, 7, 7]])
    with torch.no_grad():
        before = model(ids).logits
        adapter = new_adapter(model, 2)
        for parameter in adapter.model.parameters():
            parameter.add_(1.0)
        assert torch.equal(model(ids).logits, before)
    assert adapter.lm_head is model.lm_head


def test_the_loss_is_cross_entropy_to_full_depth(model_folder: ModelFolder) -> None:
    """-Σ p log q, with p of transformers' own model."""
    folder = model_folder("gemma2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = torch.randint(1, 300, (3, 17), generator=torch.Generator().manual_seed(0))
    training = AdapterTraining(replace(QUICK, exit_layer=2), load_stage(folder), rows)
    with torch.no_grad():
        output = model(rows[:, :-1], output_hidden_states=True)
        drafts = attention_alone(model, 2, output.hidden_states[2]).log_softmax(-1)
        expected = -(output.logits.softmax(-1) * drafts).sum(-1).mean()
        assert float(training.loss(*training.read(range(3)))) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_saved_and_loaded(model_folder: ModelFolder, tmp_path: Path, dtype: str) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("mistral", dtype=dtype)
    run = run_on(folder, data, replace(QUICK, max_steps=40), dtype=dtype)
    before = {name: tensor.clone() for name, tensor in run.stage.model.state_dict().items()}
    run.train()
    comparison = run.finish()
    assert comparison.after.divergence < comparison.before.divergence - 0.1
    assert comparison.after.match_rates["greedy"][1] > comparison.before.match_rates["greedy"][1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.stage.model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "texts.jsonl"]

    known = describe_adapter(tmp_path / "adapter", describe(str(folder)))
    card = json.loads((tmp_path / "adapter" / "adapter.json").read_text())
    assert (known.exit_layer, card["model_fingerprint"]) == (1, model_fingerprint(describe(str(folder))))
    assert card["training"]["held_out"]["num_tokens"] == comparison.num_tokens
    stage = LayerRange(load_adapter(known, load_stage(folder, dtype).model))
    assert {parameter.dtype for parameter in stage.model.parameters()} == {getattr(torch, dtype)}
    stage.begin(17)
    hidden = states(dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits, expected = stage.head(stage.run(0, 1, hidden, 0)), run.training.logits(hidden)
    assert torch.allclose(logits.float(), expected.float(), atol=1e-5 if dtype == "float32" else 0.5)


def test_adapters_for_others_and_broken_ones_are_refused(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("llama")
    out = tmp_path / "adapter"
    run = run_on(folder, data, replace(QUICK, max_steps=1))
    run.train()
    run.finish()
    with pytest.raises(ValueError, match=r"adapter='.*' was trained for layer 1 .*not for .*ppd train adapter"):
        describe_adapter(out, describe(str(model_folder("llama", seed=1))))
    with pytest.raises(ValueError, match=r"holds no adapter.json; give a folder that `ppd train adapter` wrote"):
        describe_adapter(tmp_path, describe(str(folder)))
    tensors = load_file(out / "adapter.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, out / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"adapter.safetensors is not what adapter.json describes; train the adapter"):
        describe_adapter(out, describe(str(folder)))


def test_mistakes_are_found_before_anything_is_written(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("llama")
    with pytest.raises(ValueError, match="exit_layer=4: with 4 layers choose 1 to 3"):
        run_on(folder, data, replace(QUICK, exit_layer=4))
    with pytest.raises(ValueError, match="is there already"):
        run_on(folder, data, out="texts.jsonl")
    for wrong in ({"exit_layer": 0}, {"batch_size": 0}, {"learning_rate": -1.0}, {"max_steps": 0}):
        with pytest.raises(ValueError, match=next(f"{name}={value}" for name, value in wrong.items())):
            replace(QUICK, **wrong)
    assert list(tmp_path.iterdir()) == [data]
