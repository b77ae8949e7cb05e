"""LayerSkip's recipe: who enters a layer, what the loss and its gradients are, and the model that comes out."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from heads_for_tests import write_texts
from models_for_tests import FAMILIES, build_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.training.exit_scores import exit_scores
from ppd_runtime.training.layerskip import LayerSkipRecipe, LayerSkipTraining, recipe_for
from ppd_runtime.training.layerskip_run import LayerSkipRun

ModelFolder = Callable[..., Path]
QUICK = LayerSkipRecipe(max_dropout=0.4, rotation=2, learning_rate=0.003, max_length=24, epochs=9, max_steps=8)


def run_on(model: Path, data: Path, recipe: LayerSkipRecipe = QUICK, out: str = "model") -> LayerSkipRun:
    return LayerSkipRun(str(model), str(data), recipe, data.parent / out)


def random_rows(number: int = 6) -> Tensor:
    """Rows of token ids, longer than the models' windows."""
    return torch.randint(1, 300, (number, 13), generator=torch.Generator().manual_seed(0))


def expected_loss(model: PreTrainedModel, rows: Tensor, kept: Tensor, weights: list[float]) -> Tensor:
    """Equations 1 and 5 by the letter: every sample alone, through transformers' own model without what it drops."""
    total, layers, kinds = torch.zeros(()), list(model.model.layers), getattr(model.config, "layer_types", None)
    for row, seen in zip(rows, kept.T, strict=True):
        for last, weight in enumerate(weights, start=1):
            chosen = [layer for layer in range(last) if seen[layer]]
            model.model.layers = torch.nn.ModuleList(layers[layer] for layer in chosen)
            model.config.num_hidden_layers = len(chosen)
            if kinds:
                model.config.layer_types = [kinds[layer] for layer in chosen]
            logits = model(row[None, :-1], use_cache=False).logits[0]
            total = total + weight * F.cross_entropy(logits, row[1:]) / len(rows)
    model.model.layers = torch.nn.ModuleList(layers)
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str) -> None:
    """Some samples leave out the last layer, all of them another one; exits' logits come in parts."""
    recipe = replace(QUICK, clip_norm=1e9, rotation=1, e_scale=1.0, batch_size=6)
    training = LayerSkipTraining(recipe, build_model(family), random_rows(), logits_at_once=300 * 7)
    rows = training.rows[training.batch(0)]
    kept = torch.ones(4, 6, dtype=torch.bool)
    kept[1, 3], kept[2], kept[3, ::2] = False, False, False
    training.recipe = recipe
    object.__setattr__(recipe, "kept", lambda *_: kept.numpy())
    loss = training.add_gradients(0)
    reference = build_model(family)
    expected = expected_loss(reference, rows, kept, [0, 1 / 10, 3 / 10, 6 / 10])
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    for (name, found), wanted in zip(training.model.named_parameters(), reference.parameters(), strict=True):
        if wanted.grad is None:
            assert found.grad is None or not found.grad.any(), name
        else:
            assert torch.allclose(found.grad, wanted.grad, atol=1e-4 * float(wanted.grad.abs().max() + 1)), name


def test_what_is_dropped_does_not_enter_the_layer() -> None:
    """Each layer sees the rows that the schedule leaves it, and no others: fewer behind than in front."""
    recipe = replace(QUICK, max_dropout=1.0, batch_size=40, max_steps=6)
    training = LayerSkipTraining(recipe, build_model("llama"), random_rows(40))
    seen = [0] * 4

    def count(layer: int) -> Callable[..., None]:
        def add(_: object, inputs: tuple[Tensor]) -> None:
            seen[layer] += len(inputs[0])

        return add

    for number, layer in enumerate(training.model.model.layers):
        layer.register_forward_pre_hook(count(number))
    for _ in range(6):
        training.step()
    drawn = sum(recipe.kept(step, 4, 6, 40).sum(1) for step in range(6))
    assert seen == drawn.tolist()
    assert (seen[0], seen[3]) == (240, 0)
    assert seen[1:3] == pytest.approx([240 * (2 - 2 ** (1 / 3)), 240 * (2 - 2 ** (2 / 3))], abs=30)


def test_one_exits_logits_at_a_time() -> None:
    """Full depth's and two exits' logits of 72 tokens each (the first exit has no weight), ten tokens at once."""
    training = LayerSkipTraining(
        replace(QUICK, rotation=1, batch_size=6), build_model("llama"), random_rows(), logits_at_once=3000
    )
    sizes = []
    training.model.lm_head.register_forward_hook(lambda _, __, logits: sizes.append(logits.numel()))
    training._head(torch.zeros(1, 1, 32))  # its first use tries out what the model does to logits
    sizes.clear()
    training.add_gradients(0)
    assert max(sizes) == 3000
    assert sum(sizes) == 3 * 6 * 12 * 300


def test_the_papers_settings() -> None:
    continued, scratch = recipe_for(False), recipe_for(True, seed=3, e_scale=None)
    assert (continued.max_dropout, continued.e_scale, continued.rotation) == (0.1, 0.2, 8)
    assert (continued.dropout_curriculum, continued.learning_rate) == ("constant", 3e-5)
    assert (scratch.dropout_curriculum, scratch.learning_rate, scratch.seed) == ("exponential", 8e-4, 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_folder_comes_out(model_folder: ModelFolder, tmp_path: Path, dtype: str) -> None:
    """It decodes, and what the card says of it is what transformers finds in it."""
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("mistral", dtype=dtype, eos_token_id=7)
    run = run_on(folder, data, replace(QUICK, max_steps=40))
    run.train()
    rows: list[int] = []
    report = run.finish(rows.append)
    assert rows[-1] == run.num_held_out_rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "texts.jsonl"]
    assert all(after.loss < before.loss - 0.5 for before, after in zip(report.before, report.after, strict=True))
    info = describe(str(tmp_path / "model"))
    assert (info.num_layers, info.eos_token_ids) == (4, frozenset([7]))
    card = json.loads((tmp_path / "model" / "layerskip.json").read_text())
    assert card["fingerprint"] == model_fingerprint(info)
    assert card["training"]["model_fingerprint"] == model_fingerprint(describe(str(folder)))
    assert (card["training"]["rotation"], card["training"]["steps"]) == (2, 40)
    model = AutoModelForCausalLM.from_pretrained(info.folder)
    assert model.dtype == getattr(torch, dtype)
    with torch.no_grad():
        logits = model.float()(run.held_out[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), run.held_out[:, 1:].flatten())
    assert card["training"]["held_out"]["after"][-1]["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert len(OrdinaryDecoding(str(info.folder)).generate("the quick", max_new_tokens=4).token_ids) in range(1, 5)


@torch.no_grad()
def test_exit_scores(model_folder: ModelFolder) -> None:
    model, rows = AutoModelForCausalLM.from_pretrained(model_folder("gemma2")).eval(), random_rows(3)
    output = model(rows[:, :-1], output_hidden_states=True)
    logits = model.lm_head(model.model.norm(output.hidden_states[2]))
    cap = model.config.final_logit_softcapping
    second, last = exit_scores(model, rows)[1::2]
    capped = cap * torch.tanh(logits / cap)
    assert second.loss == pytest.approx(float(F.cross_entropy(capped.flatten(0, 1), rows[:, 1:].flatten())), rel=1e-4)
    assert second.agreement == pytest.approx(float((logits.argmax(-1) == output.logits.argmax(-1)).float().mean()))
    assert (second.layer, last.layer, last.agreement) == (2, 4, 1.0)


def test_from_scratch_a_shape_and_a_tokenizer_are_enough(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), shutil.copytree(model_folder("qwen3"), tmp_path / "shape")
    (folder / "model.safetensors").unlink()
    recipe = recipe_for(True, max_length=24, max_steps=20, epochs=9)
    first, same, other = (run_on(folder, data, replace(recipe, seed=seed)) for seed in (1, 1, 2))
    weights = [run.training.model.lm_head.weight for run in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    first.train()
    report = first.finish()
    assert report.before == []
    assert describe(str(tmp_path / "model")).num_layers == 4
    with pytest.raises(ValueError, match="holds no safetensors weights"):
        run_on(folder, data, QUICK, "other")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_dropout": 1.5}, "max_dropout=1.5: give a number from 0 to 1"),
        ({"e_scale": -0.1}, "e_scale=-0.1"),
        ({"rotation": 0}, "rotation=0"),
        ({"clip_norm": float("inf")}, "clip_norm=inf"),
        ({"dropout_curriculum": "linear"}, "dropout_curriculum='linear': choose one of constant, exponential"),
        ({"exit_curriculum": "all"}, "exit_curriculum='all': choose one of rotational, gradual"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_recipes_are_checked(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LayerSkipRecipe(**changes)


def test_mistakes_are_found_before_anything_is_written(model_folder: ModelFolder, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "texts.jsonl")
    with pytest.raises(ValueError, match="has 1 layer: an early exit needs at least 2"):
        run_on(model_folder("llama", num_layers=1), data)
    with pytest.raises(ValueError, match="dtype='float16': choose one of auto, float32, bfloat16"):
        LayerSkipRun(str(model_folder("llama")), str(data), QUICK, tmp_path / "model", "float16")
    assert list(tmp_path.iterdir()) == [data]
