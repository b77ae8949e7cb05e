"""`ppd bench` on a small model: tables, files and mistakes. Pipelined decoding runs on threads here."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import ppd, refused
from transformers import GenerationMixin

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.tune.rows import check_rows, parse_rows

ROWS = (
    "ppd:k=1;launcher=ray;transport=local,layerskip:exit_layer=2;num_speculations=3,"
    "assistant_early_exit:exit_layer=2,prompt_lookup"
)
LABELS = ["autoregressive", *ROWS.split(",")]


@pytest.fixture(scope="module")
def model(model_folder: Callable[..., Path]) -> str:
    """A small model whose second layer often predicts the token; it has 512 positions."""
    return str(model_folder("llama", quiet_from=2))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts of two categories, one of them longer than the model's positions; alone in its folder."""
    rows = [("qa", "The quick brown fox"), ("math", "A model writes"), ("qa", "x" * 600)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"category": kind, "turns": [text, "?"]}) + "\n" for kind, text in rows))
    return str(path)


def run(*arguments: object) -> str:
    result = ppd("bench", *arguments, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def test_a_comparison(model: str, prompts: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("out.json", "out.md")]
    outputs = ("--out", files[0], "--markdown", files[1])
    shown = run("--model", model, "--prompts", prompts, "--methods", ROWS, "--max-new-tokens", 24, *outputs)
    assert "1 prompts were left out: too long for the model's positions" in shown
    report = json.loads(files[0].read_text())
    assert (report["num_prompts"], report["skipped_prompts"], list(report["rows"])) == (2, 1, LABELS)
    assert {group: {row["texts"] for row in rows.values()} for group, rows in report["by_group"].items()} == {
        "qa": {1},
        "math": {1},
    }
    for figures in report["overall"].values():
        assert (figures["equal_texts"], figures["equal_tokens"], figures["texts"]) == (1, 1, 2)
    layerskip, early_exit, lookup = (report["overall"][label] for label in LABELS[2:])
    assert 0.5 < layerskip["acceptance_rate"] < 1
    assert layerskip["mean_accepted_length"] > 1.5
    assert layerskip["draft_cost"] > 0
    assert layerskip["allowed_speedup"] > 0
    assert early_exit["acceptance_rate"] > 0.3
    assert lookup["compression_rate"] >= 1
    allowed = report["overall"]["ppd:k=1;launcher=ray;transport=local"]["allowed_speedup"]
    assert allowed is None or allowed >= 1, "None: guesses cost time here, so nothing was asked"
    assert files[1].read_text().count("\n| layerskip:exit_layer=2;num_speculations=3 |") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md", "prompts.jsonl"]


def test_every_method_has_the_weights(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    methods = f"{LABELS[1]},layerskip,adaspeed,swift:search_steps=2"
    shown = run("--model", model, "--prompts", prompts, "--methods", methods, "--weights", "int4",
                "--max-new-tokens", 8, "--out", out)  # fmt: skip
    assert "int4 weights, float32 on cpu" in " ".join(shown.split())
    report = json.loads(out.read_text())
    assert report["weights"] == "int4"
    assert [figures["equal_tokens"] for figures in report["overall"].values()] == [1] * 5
    _, left_out = check_rows(parse_rows("all"), describe(model, "int4"), SamplingParams())
    assert "has no products with int4 weights" in left_out["prompt_lookup"]
    assert "has no products with int4 weights" in left_out["assistant_early_exit"]


def test_samples_and_rounds(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    methods = "layerskip,adaspeed:exit_layer=2;threshold=0.1"
    sampling = ("--temperature", 0.9, "--top-p", 0.95, "--seed", 3)
    run("--model", model, "--prompts", prompts, "--methods", methods, *sampling, "--max-new-tokens", 12, "--rounds", 2,
        "--limit", 1, "--out", out)  # fmt: skip
    report = json.loads(out.read_text())
    assert [figures["texts"] for figures in report["overall"].values()] == [4, 4, 4]
    assert [figures["equal_tokens"] for figures in report["overall"].values()] == [1, 1, 1]


def test_a_failure_of_transformers_is_its_rows(
    model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("no early exit\nfor this one")

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", refuse)
    out = tmp_path / "out.json"
    shown = run("--model", model, "--prompts", prompts, "--methods", "assistant_early_exit,layerskip",
                "--max-new-tokens", 4, "--out", out)  # fmt: skip
    assert "assistant_early_exit failed: TypeError: no early exit for this one" in " ".join(shown.split())
    report = json.loads(out.read_text())
    assert list(report["overall"]) == ["autoregressive", "layerskip"]
    assert list(report["failures"]) == ["assistant_early_exit"]


def test_a_text_that_differs_is_told(model: str, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    shown = run("--model", model, "--prompts", prompts, "--methods", "layerskip:acceptance=rejection",
                "--temperature", 1, "--max-new-tokens", 16, "--out", out)  # fmt: skip
    figures = json.loads(out.read_text())["overall"]["layerskip:acceptance=rejection"]
    assert figures["equal_texts"] < 1
    assert "% of the texts are ordinary decoding's." in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--methods medusa", "method 'medusa': choose among all, autoregressive, ppd, layerskip"),
        ("--methods layerskip:depth=2", "layerskip has no setting 'depth'"),
        ("--methods layerskip:exit_layer", "'layerskip:exit_layer': give settings as METHOD:NAME=VALUE;NAME=VALUE"),
        ("--methods layerskip:exit_layer=9", "layerskip:exit_layer=9: exit_layer=9: with 4 layers choose 1 to 3"),
        ("--methods layerskip:dtype=float32", "dtype is the same for all methods"),
        ("--weights int3 --methods ppd:k=1", "--weights int3: choose one of int8, int4"),
        ("--weights int8 --methods prompt_lookup", "prompt_lookup: transformers has no products with int8 weights"),
        ("--methods adaspeed:adaptation=1", "adaptation cannot be chosen in a comparison"),
        ("--methods autoregressive:k=1", "ordinary decoding is what the others are compared with"),
        ("--methods ppd:k=0", "ppd:k=0: k=0: must be at least 1"),
        ("--methods kangaroo", "kangaroo needs adapter=FOLDER"),
        ("--methods kangaroo:adapter=5", "kangaroo:adapter=5: "),
        ("--methods prompt_lookup --temperature 1", "prompt_lookup: transformers draws its samples otherwise"),
        ("--methods assistant_early_exit:exit_layer=4", "exit_layer=4: with 4 layers choose 1 to 3"),
        ("--prompts none.jsonl", "none.jsonl: No such file or directory"),
        ("--rounds 0", "--rounds 0: give a whole number of at least 1"),
        ("--max-new-tokens 512", "none of the 3 prompts and --max-new-tokens 512 fit the model's 512 positions"),
        ("--dtype int8", "--dtype int8: choose one of"),
        ("--json out.json", "--json prints on standard output and takes no file: give --out out.json"),
        ("--out FOLDER/none/out.json", "give a file in a folder that exists"),
        ("--markdown FOLDER/out --out FOLDER/out", "is to be written twice"),
    ],
)
def test_mistakes_get_one_line(model: str, prompts: str, tmp_path: Path, arguments: str, named: str) -> None:
    given = arguments.replace("FOLDER", str(tmp_path)).split()
    defaults = (("--prompts", prompts), ("--methods", "layerskip"))
    options = [part for option in defaults if option[0] not in given for part in option]
    assert named in refused("bench", "--model", model, *given, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
