"""Trained exit heads as users meet them: trained, measured and run by the command line, over threads and processes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ppd, printed, refused
from grids import nightly
from heads_for_tests import make_drafter, make_head, write_texts

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.heads import AFFINE, GATED, LM_HEAD
from ppd_runtime.training.exit_head import HeadTraining

ModelFolder = Callable[..., Path]
PROMPT = "The quick brown fox"
QUICK = ("--batch-size", 4, "--max-length", 32, "--epochs", 1, "--max-steps", 6)


@pytest.fixture(scope="module")
def model(model_folder: ModelFolder) -> Path:
    """A small model."""
    return model_folder("llama")


@pytest.fixture
def head(model: Path, tmp_path: Path) -> Path:
    """A head for layer 3 of it."""
    return make_head(tmp_path / "head", model, AFFINE, 3).folder


@pytest.mark.parametrize(
    ("launcher", "transport", "kind"),
    [
        ("auto", "local", AFFINE),
        ("auto", "local", GATED),
        ("processes", "zeromq", LM_HEAD),
        pytest.param("ray", "zeromq", LM_HEAD, marks=nightly),
    ],
)
def test_exact_tokens_with_trained_heads(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, launcher: str, transport: str, kind: str
) -> None:
    if launcher == "ray":
        request.getfixturevalue("ray_node")
    ordinary, folder = OrdinaryDecoding(str(model)), make_head(tmp_path / "head", model, kind, 3).folder
    with PPDRuntime(str(model), k=2, exit_head=folder, transport=transport, launcher=launcher) as runtime:
        assert runtime.exit_layer == 3
        for setting in ({}, {"temperature": 1.0, "seed": 3}):
            result = runtime.generate(PROMPT, max_new_tokens=16, **setting)
            assert result.token_ids == ordinary.generate(PROMPT, max_new_tokens=16, **setting).token_ids
            assert result.stats.hits + result.stats.misses == 15


@nightly
@pytest.mark.usefixtures("ray_node")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_named_drafter_travels_to_workers_of_ray(model: Path, tmp_path: Path, stages: int) -> None:
    drafter = make_drafter(tmp_path / "drafter", str(model), range(300))
    ordinary = OrdinaryDecoding(str(model))
    given = {"drafter": drafter.folder, "speculation": "always", "emulate": EmulatedDevice(1.0), "rows": 4}
    with PPDRuntime(str(model), stages=stages, launcher="ray", **given) as runtime:
        assert all(spec.drafter == drafter for spec in runtime._specs)
        for setting in ({}, {"temperature": 1.0, "seed": 3}):
            result = runtime.generate(PROMPT, max_new_tokens=16, **setting)
            assert result.token_ids == ordinary.generate(PROMPT, max_new_tokens=16, **setting).token_ids


def test_train_measure_and_generate(model: Path, tmp_path: Path) -> None:
    data, out = write_texts(tmp_path / "texts.jsonl"), tmp_path / "head"
    command = ("train", "exit-head", "--model", model, "--data", data, "--out", out, "--loss", "distil", *QUICK)
    shown = printed(*command, "--exit-layer", 3, "--learning-rate", 0.01)
    assert "lm-head for layer 3 of 4" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "texts.jsonl"]
    card = json.loads((out / "exit_head.json").read_text())
    assert f"{card['training']['held_out']['after']['match_rates']['greedy']['3']:.4f}" in shown

    rates = tmp_path / "rates.json"
    measured = ("match-rate", "--model", model, "--limit", 2, "--max-new-tokens", 8, "--out", rates)
    printed(*measured, "--exit-head", out)
    report = json.loads(rates.read_text())
    assert (list(report["match_rates"]), report["exit_head"]) == (["3"], f"lm-head {card['weights_sha256']}")

    expected = OrdinaryDecoding(str(model)).generate(PROMPT, max_new_tokens=8)
    arguments = (
        "--model",
        model,
        "--exit-head",
        out,
        "--k",
        1,
        "--transport",
        "local",
        "--max-new-tokens",
        8,
        "--json",
    )
    assert tuple(json.loads(printed("generate", PROMPT, *arguments))["token_ids"]) == expected.token_ids


def test_json(model: Path, tmp_path: Path) -> None:
    given = ("--model", model, "--data", write_texts(tmp_path / "texts.jsonl"), "--out", tmp_path / "head", *QUICK)
    output = json.loads(printed("train", "exit-head", "--kind", "affine", "--json", "--threads", 1, *given))
    assert (output["steps"], list(output["after"]["match_rates"])) == (6, ["greedy", "shared_noise", "logits"])
    assert json.loads((tmp_path / "head" / "exit_head.json").read_text())["exit_layer"] == 2


def test_a_stopped_training_says_how_to_go_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_texts(tmp_path / "texts.jsonl"), tmp_path / "head"
    command = ("train", "exit-head", "--kind", "affine", "--model", model, "--data", data, "--out", out, *QUICK)
    step = HeadTraining.step

    def interrupted(self: HeadTraining) -> float:
        if self.steps == 4:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "step", interrupted)
        patch.setattr(HeadTraining.take_steps, "__defaults__", (0.0,))  # save after every step
        result = ppd(*command)
    assert result.exit_code == 130
    assert "head.unfinished; the same command goes on" in result.stderr
    assert not out.exists()
    assert "unfinished training with --seed 0, not 1" in refused(*command, "--seed", 1)
    printed(*command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "texts.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("generate x --exit-head OTHER", "was trained for layer 3 of model"),
        ("generate x --exit-head HEAD --exit-layer 2", "not for layer 2: choose layer 3 alone"),
        ("generate x --exit-head FOLDER/none", "holds no exit_head.json; give 'shared' or a folder"),
        ("match-rate --exit-head OTHER", "was trained for layer 3 of model"),
        ("match-rate --exit-head HEAD --exit-layers all", "not for layers 1, 2: choose layer 3 alone"),
        ("match-rate --exit-head FOLDER/none", "holds no exit_head.json"),
        ("train exit-head --out HEAD", "is there already: choose another folder"),
        ("train exit-head --out FOLDER/a/b", "give a new folder in one that exists"),
        ("train exit-head --out FOLDER/new --exit-layer 4", "--exit-layer 4: with 4 layers choose 1 to 3"),
        ("train exit-head --out FOLDER/new --kind mlp", "--kind mlp: choose one of lm-head, affine"),
        ("train exit-head --out FOLDER/new --data FOLDER/broken.jsonl", "broken.jsonl, line 2: no JSON at column"),
        ("train exit-head --out FOLDER/new --threads 0", "--threads 0: must"),
    ],
)
def test_mistakes_get_one_line(
    model: Path, model_folder: ModelFolder, head: Path, tmp_path: Path, arguments: str, named: str
) -> None:
    other = make_head(tmp_path / "other", model_folder("llama", seed=1), LM_HEAD, 3).folder
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text":\n')
    before = sorted(tmp_path.rglob("*"))
    given = arguments.replace("OTHER", str(other)).replace("HEAD", str(head)).replace("FOLDER", str(tmp_path))
    assert named in " ".join(refused(*given.split(), "--model", model).split())
    assert sorted(tmp_path.rglob("*")) == before
