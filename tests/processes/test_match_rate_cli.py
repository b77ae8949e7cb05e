"""`ppd match-rate` as a user runs it: tables, files and mistakes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ppd, refused

from ppd_runtime.cost_model.match_rates import read_match_rates

PROMPTS = ("The quick brown fox", "A model writes", "Whoever may compute the next token")


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path]) -> str:
    """A small model."""
    return str(model_folder("llama"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """A file of prompts, alone in its folder."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return str(path)


def run(*arguments: object) -> str:
    result = ppd("match-rate", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_a_greedy_measurement(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    shown = run("--model", model, "--prompts", prompts, "--max-new-tokens", 16, "--out", out)
    assert "greedy: 48 tokens of 3 prompts compared" in " ".join(shown.split())
    assert max(map(len, shown.splitlines()[1:])) <= 80
    report = json.loads(out.read_text())
    assert (report["comparisons"], report["num_prompts"], report["skipped_prompts"]) == (48, 3, 0)
    assert (report["ranking"], list(report["rankings"])) == ("logits", ["logits"])
    assert list(report["match_rates"]) == ["1", "2", "3"]
    assert list(report["match_rates"]["2"]) == ["1", "3", "5"]
    assert f"{report['match_rates']['2']['3']:.3f}" in shown
    ranges = report["rankings"]["logits"]["by_position"]
    assert [row["positions"] for row in ranges] == [[first, first + 1] for first in range(1, 16, 2)]
    assert sum(row["comparisons"] for row in ranges) == 48
    assert read_match_rates(out).rates[2, 3] == report["match_rates"]["2"]["3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl", "rates.json"]


def test_a_sampled_measurement_gives_both_rankings(model: str, prompts: str, tmp_path: Path) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--max-new-tokens", 8, "--exit-layers", "3,2", "--k", 2)
    out = tmp_path / "rates.json"
    shown = run(*arguments, "--temperature", 1, "--top-p", 0.9, "--seed", 5, "--limit", 2, "--out", out)
    assert "candidates by logits and shared noise" in shown
    report = json.loads(out.read_text())
    assert (report["ranking"], list(report["rankings"])) == ("shared_noise", ["shared_noise", "logits"])
    assert report["match_rates"] == report["rankings"]["shared_noise"]["match_rates"]
    assert [list(rates) for rates in report["match_rates"].values()] == [["2"], ["2"]]
    assert list(report["match_rates"]) == ["2", "3"]
    assert report["comparisons"] == 16


def test_weights_of_few_bits_are_named(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    shown = run("--model", model, "--prompts", prompts, "--max-new-tokens", 8, "--weights", "int4", "--out", out)
    assert ", int4 weights, 4 layers, greedy" in " ".join(shown.split())
    assert json.loads(out.read_text())["weights"] == read_match_rates(out).weights == "int4"


def test_first_boundaries_of_even_and_of_other_stages(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    arguments = ("--model", model, "--prompts", prompts, "--max-new-tokens", 8, "--exit-layers", 3, "--k", "1,3")
    shown = run(*arguments, "--stages", "4,2", "--cuts", "1,3", "--cuts", 3, "--temperature", 1, "--out", out)
    assert max(map(len, shown.splitlines()[1:])) <= 80
    words = " ".join(shown.split())
    assert "4 stages: the first boundary with the token, candidates by logits and shared noise" in words
    report = json.loads(out.read_text())
    assert [row["cuts"] for row in report["first_boundary"]] == [[2], [3], [1, 3], [1, 2, 3]]
    assert report["first_boundary"] == report["rankings"]["shared_noise"]["first_boundary"]
    for row in report["first_boundary"]:
        assert row["shares"]["3"][0] == pytest.approx(report["match_rates"][str(row["cuts"][0])]["3"])
        assert sum(row["shares"]["1"]) == pytest.approx(1)
    assert read_match_rates(out).as_dict()["first_boundary"] == report["first_boundary"]


def test_skipped_prompts_are_counted(model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("x" * 600, "The quick")))
    result = ppd(
        "match-rate", "--model", model, "--prompts", path, "--max-new-tokens", 4, "--out", tmp_path / "out.json"
    )
    assert result.exit_code == 0
    assert result.stderr == "ppd: skipped 1 of 2 prompts: too long for the model's positions\n"
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["num_prompts"], report["skipped_prompts"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--exit-layers 4", "exit_layer=4: with 4 layers choose 1 to 3"),
        ("--exit-layers 0,2", "exit_layer=0"),
        ("--exit-layers some", "--exit-layers some: give whole numbers with commas between them"),
        ("--stages 1,2", "--stages 1: give a whole number of at least 2"),
        ("--stages 5", "--stages 5: with 4 layers choose 2 to 4"),
        ("--stages two", "--stages two: give whole numbers with commas between them"),
        ("--cuts 3,1", "--cuts 3,1: with 4 layers give layers from 1 to 3, each above the one before"),
        ("--k 301", "--k 301 is more than the 300 tokens of the vocabulary"),
        ("--k 0", "--k 0"),
        ("--max-new-tokens 0", "--max-new-tokens 0"),
        ("--weights int3", "--weights int3: choose one of int8, int4"),
        ("--weights int8 --dtype bfloat16", "--dtype bfloat16 with --weights int8: its states are in float32"),
        ("--max-new-tokens 600", "none of the 3 prompts and --max-new-tokens 600 fit the model's 512 positions"),
        ("--limit 0", "--limit 0"),
        ("--out FOLDER/none/rates.json", "give a file in a folder that exists"),
        ("--prompts FOLDER/none.jsonl", "none.jsonl: No such file or directory"),
        ("--prompts FOLDER/broken.jsonl --out FOLDER/rates.json", "broken.jsonl, line 2: no JSON at column 11"),
        ("--prompts FOLDER/other.jsonl --out FOLDER/rates.json", 'other.jsonl, line 1: no text under "prompt"'),
        ("--prompts FOLDER/empty.jsonl", "empty.jsonl: holds no prompts"),
        ("--model FOLDER/none", "no such folder"),
    ],
)
def test_mistakes_are_named_in_one_line(model: str, prompts: str, tmp_path: Path, arguments: str, named: str) -> None:
    texts = {"broken": '{"prompt": "a"}\n{"prompt": \n', "other": '{"text": "a"}', "empty": "\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    before = sorted(tmp_path.iterdir())
    given = arguments.replace("FOLDER", str(tmp_path)).split()
    assert named in refused("match-rate", "--model", model, "--prompts", prompts, *given)
    assert sorted(tmp_path.iterdir()) == before
