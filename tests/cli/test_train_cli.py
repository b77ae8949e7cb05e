"""`ppd train`: what the commands print and write, and what they refuse."""

import json
import re
from pathlib import Path

import pytest
from commands import printed, refused
from heads_for_tests import write_texts

QUICK = ("--max-steps", 3, "--max-length", 24)


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("adapter --exit-layer 1", "adapter for layer 1 of 4 of"),
        ("probe", "probe for layer 1 of 4 of"),
        ("layerskip --max-dropout 0.3", "LayerSkip training of"),
        ("layerskip --from-scratch --exit-curriculum gradual", "LayerSkip training of"),
    ],
)
def test_a_table_and_a_folder(model_folder, tmp_path: Path, command: str, title: str) -> None:
    data, out = write_texts(tmp_path / "texts.jsonl"), tmp_path / "out"
    shown = printed("train", *command.split(), "--model", model_folder("llama"), "--data", data, "--out", out, *QUICK)
    assert title in shown
    assert "3 steps" in " ".join(shown.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts.jsonl"]
    (card,) = (json.loads((out / name).read_text()) for name in CARDS if (out / name).exists())
    numbers = re.findall(r"\b\d\.\d{4}\b", shown)
    assert set(numbers) <= set(rounded(card["training"]["held_out"])) | {"0.5000"}
    assert len(numbers) > 6


CARDS = ("adapter.json", "probe.json", "layerskip.json")


def rounded(value: object) -> list[str]:
    """All numbers of a card as a table shows them, and what is left of 1."""
    if isinstance(value, dict | list):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in rounded(part)]
    return [f"{value:.4f}", f"{1 - value:.4f}"]


def test_json(model_folder, tmp_path: Path) -> None:
    data, out = write_texts(tmp_path / "texts.jsonl"), tmp_path / "out"
    command = ("train", "probe", "--model", model_folder("llama"), "--data", data, "--out", out, *QUICK, "--json")
    output = json.loads(printed(*command))
    assert (output["steps"], output["out"]) == (3, str(out))
    assert {"accepted", "probe", "confidence"} <= set(output)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("adapter --exit-layer 4", "--exit-layer 4: with 4 layers choose 1 to 3"),
        ("adapter --learning-rate -1", "--learning-rate -1.0"),
        ("probe --exit-layer 0", "--exit-layer 0: with 4 layers choose 1 to 3"),
        ("probe --threads 0", "--threads 0: must be at least 1"),
        ("probe --threads 4096", "--threads 4096: there are"),
        ("layerskip --exit-curriculum all", "--exit-curriculum all: choose one of rotational, gradual"),
        ("layerskip --max-dropout 2", "--max-dropout 2.0: give a number from 0 to 1"),
        ("layerskip --dtype float16", "--dtype float16: choose one of auto, float32, bfloat16"),
        ("layerskip --data FOLDER/none", "none: No such file or directory; give a file of texts, or 'demo'"),
        ("adapter --exit-layer 1 --out FOLDER/texts.jsonl", "is there already: choose another folder"),
    ],
)
def test_mistakes_get_one_line(model_folder, tmp_path: Path, arguments: str, named: str) -> None:
    data = write_texts(tmp_path / "texts.jsonl")
    given = arguments.replace("FOLDER", str(tmp_path)).split()
    defaults = [("--model", model_folder("llama")), ("--data", data), ("--out", tmp_path / "out")]
    options = [part for option in defaults if option[0] not in given for part in option]
    assert named in " ".join(refused("train", *given, *options).split())
    assert list(tmp_path.iterdir()) == [data]
