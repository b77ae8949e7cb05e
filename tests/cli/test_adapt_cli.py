"""`ppd adapt`: what it prints and writes, and what it refuses in a line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ppd_runtime.cli.adapt import _print_plan
from ppd_runtime.cli.main import app
from ppd_runtime.training.adapt import answers, run
from ppd_runtime.tune.layouts import HEADS
from ppd_runtime.tune.tables import plain_table


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 8)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["adapt", *map(str, arguments)])


def test_a_table_and_a_folder(model_folder, tmp_path: Path) -> None:
    out, model = tmp_path / "heads", model_folder("llama")
    shown = invoke(model, "--minutes", 0.03, "--stages", "2,4", "--out", out)
    assert shown.exit_code == 0, shown.output
    report = json.loads((out / "report.json").read_text())
    assert f"heads and drafter of {report['model']}: {report['texts']} texts" in shown.stdout
    greedy, sampled = shown.stdout.split("\nat temperature 1, ranked with the shared noise\n")
    for way, printed in (("greedy", greedy), ("sampled", sampled)):
        for layer in report[way]["layers"]:
            rates = "  ".join(f"{layer['before']['all'][k]:.2f} → {layer['after']['all'][k]:.2f}" for k in "135")
            assert f"all  {rates}\n" in printed
    covered = [f"{report[way]['covered']:.3f}" for way in ("greedy", "sampled")]
    assert f"the shortlist has {covered[0]}, at temperature 1 {covered[1]}\n" in greedy
    assert f"{report['plan']['verdict']}\n\nthey are in {out}" in sampled
    assert max(len(line) for line in shown.stdout.splitlines() if str(out.parent.parent) not in line) <= 80


def test_what_stays_is_told(model_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = "what was there stays where it foresees as much or more (--replace takes the new parts):\n"
    for layer, more, stays in ((1, [], False), (2, [], True), (2, ["--replace"], False)):
        shown = invoke(model_folder("llama"), "--minutes", 0.02, "--layers", layer, *more)
        assert shown.exit_code == 0, shown.output
        assert (told in shown.stdout, "layer 1, which got no new head\n" in shown.stdout) == (stays, stays)


def test_json(model_folder, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    shown = invoke(model_folder("llama"), "--minutes", 0.03, "--layers", 2, "--out", out, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == json.loads((out / "report.json").read_text())


@pytest.mark.parametrize(("arguments", "place"), [("", {}), ("--threads 1", {"threads": 1})])
def test_all_cores_compute_unless_told(monkeypatch: pytest.MonkeyPatch, arguments: str, place: dict[str, int]) -> None:
    asked: list[dict[str, object]] = []

    def refuse(*_: object, **given: object) -> None:
        asked.append(given)
        raise ValueError("asked")

    monkeypatch.setattr(run, "adapt", refuse)
    invoke("demo", *arguments.split())
    assert asked[0]["place"] == place


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--minutes 0", "--minutes 0.0: give a finite number of at least 0.01"),
        ("--stages 2,x", "--stages 2,x: give whole numbers with commas between them"),
        ("--stages 9", "--stages 9: with 4 layers choose 2 to 4"),
        ("--layers 4", "--layers 4: with 4 layers give layers from 1 to 3"),
        ("--stages 2 --layers 2", "stages and layers are both given: give one of them"),
        ("--prompts FOLDER/none", "none: No such file or directory; give a file of prompts"),
        ("--threads 0", "--threads 0: must be at least 1"),
        ("--threads 4096", "--threads 4096: there are"),
    ],
)
def test_mistakes_get_one_line(model_folder, tmp_path: Path, arguments: str, named: str) -> None:
    given = arguments.replace("FOLDER", str(tmp_path)).split()
    shown = invoke(model_folder("llama"), "--out", tmp_path / "heads", *given)
    assert shown.exit_code == 2
    assert shown.stderr.count("\n") == 1
    assert named in shown.stderr
    assert not list(tmp_path.iterdir())


def test_the_plan_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["ordinary decoding", 2.0, "1.00", "", "", ""], ["one stage", 1.5, "1.33 (1.30–1.40)", "1.40", "90%", True]]
    plan = {"title": "a model: 5 s of each", "heads": HEADS, "rows": rows, "cautions": ["k=1 was left out: none"]}
    _print_plan({**plan, "verdict": "one stage: 1.5 ms a token"})
    assert capsys.readouterr().out == f"\na model: 5 s of each\n\n{plain_table(HEADS, rows)}\n\n" + (
        "k=1 was left out: none\none stage: 1.5 ms a token\n"
    )
