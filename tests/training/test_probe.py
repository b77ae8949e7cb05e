"""AdaSPEED's probe: its loss, what it reports, and its training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from heads_for_tests import write_texts
from models_for_tests import load_stage
from transformers import AutoModelForCausalLM

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.trained.probe import Probe, describe_probe, load_probe
from ppd_runtime.training.probe import ProbeRecipe, ProbeRun, ProbeTraining
from ppd_runtime.training.probe_report import area_under_curve, forecast

ModelFolder = Callable[..., Path]
QUICK = ProbeRecipe(exit_layer=2, learning_rate=0.05, max_length=24, epochs=9, max_steps=8)


def run_on(model: Path, data: Path, recipe: ProbeRecipe = QUICK, out: str = "probe") -> ProbeRun:
    return ProbeRun(str(model), str(data), recipe, data.parent / out, "float32")


def test_the_formula() -> None:
    probe = Probe(3)
    assert probe(torch.ones(1, 2, 3)).tolist() == [[0.5, 0.5]]
    with torch.no_grad():
        probe.direction.copy_(torch.tensor([1.0, 2.0, -1.0]))
        probe.bias.fill_(0.5)
    assert probe(torch.tensor([1.0, 1.0, 0.5])).item() == pytest.approx(1 / (1 + np.exp(-3.0)))


def test_the_papers_500_batches_of_4() -> None:
    recipe = ProbeRecipe(exit_layer=3)
    assert (recipe.batch_size, recipe.max_steps) == (4, 500)


def test_areas_under_curves() -> None:
    """Of four pairs of an accepted and a rejected token three are in order, or two and a tie."""
    accepted = np.array([True, False, True, False])
    assert area_under_curve(np.array([0.9, 0.1, 0.4, 0.6]), accepted) == 0.75
    assert area_under_curve(np.array([0.9, 0.1, 0.4, 0.4]), accepted) == 0.875
    assert area_under_curve(np.array([0.1, 0.9, 0.2, 0.8]), accepted) == 0.0
    assert area_under_curve(np.array([0.1, 0.9]), np.array([True, True])) == 0.5


def test_a_forecast() -> None:
    found = forecast(np.array([0.8, 0.4, 0.25]), np.array([True, True, False]))
    assert found.loss == pytest.approx(-np.log([0.8, 0.4, 0.75]).mean())
    assert (found.accuracy, found.auc) == (pytest.approx(2 / 3), 1.0)


def test_the_loss_is_binary_cross_entropy_on_drafts(model_folder: ModelFolder) -> None:
    """Against transformers' own hidden states and logits, for a probe that has learned something."""
    folder = model_folder("gemma2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = torch.randint(1, 300, (6, 17), generator=torch.Generator().manual_seed(0))
    training = ProbeTraining(QUICK, load_stage(folder), rows)
    for _ in range(8):
        training.step()
    with torch.no_grad():
        output = model(rows[:, :-1], output_hidden_states=True)
        exit_states = output.hidden_states[2]
        accepted = model.lm_head(model.model.norm(exit_states)).argmax(-1) == output.logits.argmax(-1)
        probabilities = training.probe()(exit_states)
        expected = -torch.where(accepted, probabilities, 1 - probabilities).log().mean()
        assert float(training.loss(*training.read(np.arange(6)))) == pytest.approx(float(expected), rel=1e-3)
    assert abs(float(expected) - np.log(2)) > 0.05


def test_trained_saved_and_loaded(model_folder: ModelFolder, tmp_path: Path) -> None:
    """On the demo model, whose drafts are accepted for reasons."""
    data = write_texts(tmp_path / "texts.jsonl", 100)
    run = ProbeRun("demo", str(data), replace(QUICK, exit_layer=3, max_steps=25), tmp_path / "probe", "float32")
    run.train()
    report = run.finish()
    assert 0.1 < report.accepted < 0.9
    assert report.probe.auc > 0.65
    assert report.probe.accuracy > max(report.accepted, 1 - report.accepted)
    card = json.loads((tmp_path / "probe" / "probe.json").read_text())
    assert card["training"]["held_out"] == report.as_dict()
    known = describe_probe(tmp_path / "probe", describe("demo"))
    probe, hidden = load_probe(known, run.stage.model), torch.randn(1, 5, 256)
    assert torch.equal(probe(hidden), run.training.probe()(hidden))
    with pytest.raises(ValueError, match=r"probe='.*' was trained for layer 3 .*ppd train probe"):
        describe_probe(tmp_path / "probe", describe(str(model_folder("llama"))))
    with pytest.raises(ValueError, match=r"not for layer 2: choose layer 3 alone"):
        known.check_layers([2])


def test_mistakes_are_found_before_anything_is_written(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("llama")
    with pytest.raises(ValueError, match="exit_layer=9: with 4 layers choose 1 to 3"):
        run_on(folder, data, replace(QUICK, exit_layer=9))
    assert list(tmp_path.iterdir()) == [data]
