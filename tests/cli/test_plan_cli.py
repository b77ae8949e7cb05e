"""`ppd plan --devices`: nothing is measured, no model is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ppd, refused

from ppd_runtime.cost_model import devices
from ppd_runtime.cost_model.devices import Parts
from ppd_runtime.cost_model.match_rates import read_match_rates

TIMES = ("--layer-ms", "0.4", "--head-ms", "0.3", "--exit-head-ms", "0.3", "--hop-ms", "0.1")
RATES = {"3": {"1": 0.3, "3": 0.4}, "4": {"1": 0.6, "3": 0.8}, "7": {"1": 0.9, "3": 0.95}}
BOUNDARIES = [
    {"cuts": [4], "shares": {"1": [0.6, 0.4], "3": [0.8, 0.2]}},
    {"cuts": [2, 4, 6], "shares": {"1": [0.3, 0.3, 0.2, 0.2], "3": [0.6, 0.2, 0.1, 0.1]}},
    {"cuts": [1, 2, 4, 6], "shares": {"3": [0.5, 0.1, 0.2, 0.1, 0.1]}},
]


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """A file as `ppd match-rate` writes them."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"match_rates": RATES, "num_layers": 8, "first_boundary": BOUNDARIES}))
    return path


def test_the_table_and_the_file(rates: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = ppd("plan", "--match-rates", rates, *TIMES, "--devices", 4, "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    data, known = json.loads(out.read_text()), read_match_rates(rates)
    covered, _ = known.covered(8)
    expected = devices.rank(8, covered, Parts(0.4, 0.3, 0.3, 0.1), 4)
    assert [row["name"] for row in data["predicted"]] == [row.name for row in expected]
    best = expected[0]
    assert (best.name, data["best"], data["gains"]) == ("4 stages, k=3", "4 stages, k=3", True)
    assert data["verdict"].startswith(f"4 stages, k=3: {best.ms_per_token:.3g} ms a token, {best.speedup:.2f} times")
    assert data["verdict"].endswith("(ppd generate --cuts 2,4,6 --k 3)")
    assert data["verdict"] in result.stdout
    assert "Left out exit layers 3: Theorem 4.1 needs at least half depth." in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    figures = [f"{best.ms_per_token:.3f}", f"{best.speedup:.2f}", f"{best.allowed_speedup:.2f}"]
    assert ["4", "stages,", "k=3", "4", *figures, f"{best.compute_per_token:.2f}"] in lines
    assert data["ordinary_ms_per_token"] == pytest.approx(8 * 0.4 + 0.3)
    assert data["parts"] == {"layer_ms": 0.4, "head_ms": 0.3, "exit_head_ms": 0.3, "hop_ms": 0.1, "row_cost": 0.0}
    assert read_match_rates(out).rates == covered.rates
    assert read_match_rates(out).first_boundary == known.first_boundary


def test_what_is_asked_for_is_planned(rates: Path) -> None:
    def planned(*more: object) -> dict:
        result = ppd("plan", "--match-rates", rates, *TIMES, "--devices", 4, "--json", *more)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    assert planned("--hop-ms", 9)["verdict"].startswith("don't: the best, ")
    assert {row["name"].split("k=")[1][0] for row in planned("--k", 1)["predicted"]} == {"1"}
    assert any("give --row-cost 1" in caution for caution in planned()["cautions"])
    assert not any("--row-cost" in caution for caution in planned("--row-cost", 0)["cautions"])
    dear, free = (planned("--row-cost", cost)["predicted"] for cost in (0.5, 0))
    assert dear[0]["ms_per_token"] > free[0]["ms_per_token"]
    parallel = planned("--all-reduce-ms", 0.01)
    assert {row["name"] for row in parallel["predicted"] if not row["options"]} == {
        "tensor parallelism on 2",
        "tensor parallelism on 4",
    }
    assert "; tensor parallelism on 4 devices is faster: " in parallel["verdict"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("ASKED --match-rates FOLDER/high.json", "match_rates[4][1]=1.5: give a number from 0 to 1"),
        ("ASKED --match-rates FOLDER/deep.json", "deep.json: exit layer 8 is not before the last of 8 layers"),
        ("ASKED --match-rates FOLDER/cuts.json --layers 6", "cuts='4,7': with 6 layers give layers from 1 to 5"),
        ("ASKED --match-rates FOLDER/zero.json", "zero.json: num_layers=0: give a whole number of at least 2"),
        ("ASKED --match-rates FOLDER/rates.json --layers 6", "--layers 6, but FOLDER/rates.json is of 8 layers"),
        ("ASKED --match-rates FOLDER/bare.json", "does not say how many layers the model has: give --layers"),
        ("ASKED --match-rates FOLDER/rates.json --k 2", "no match rate for exit layer 4 with --k 2"),
        ("ASKED --match-rates FOLDER/rates.json --k 0", "--k 0"),
        ("ASKED --match-rates FOLDER/rates.json --head-ms -1", "--head-ms -1.0: give a finite number of at least 0"),
        ("ASKED --match-rates FOLDER/rates.json --row-cost 2", "--row-cost 2.0: give a number from 0 to 1"),
        ("ASKED --match-rates FOLDER/rates.json --all-reduce-ms -1", "--all-reduce-ms -1"),
        ("ASKED --match-rates FOLDER/int8.json --weights int4", "int8.json was measured with weights in int8, and the"),
        ("ASKED --match-rates FOLDER/three.json", "three.json: weights='int3': choose one of floats, int8, int4"),
        ("--devices 4 --match-rates FOLDER/rates.json --layer-ms 0 --hop-ms 1", "--layer-ms 0"),
        (
            "--devices 4 --match-rates FOLDER/rates.json --hop-ms 1",
            "--devices 4: needs --layer-ms as well, give it too",
        ),
        ("--devices 4 --layer-ms 1 --hop-ms 1", "--devices 4: needs --match-rates as well, give it too"),
        ("--devices 4 --match-rates FOLDER/rates.json --layer-ms 1", "--devices 4: needs --hop-ms as well"),
        ("--devices 1 --hop-ms 1", "--devices 1"),
        (
            "ASKED --match-rates FOLDER/rates.json --exit-head trained",
            "--exit-head trained with --devices: `ppd match-rate --exit-head` measures its",
        ),
        ("--hop-ms 0.1", "--hop-ms 0.1: is for devices that are not here, give --devices as well"),
        ("--match-rates FOLDER/rates.json", "is for devices that are not here, give --devices as well"),
        ("--out FOLDER/none/plan.json", "give a file in a folder that exists"),
        ("--seconds -1", "--seconds -1"),
        ("--prompts FOLDER/broken.jsonl", "broken.jsonl, line 2: no JSON at column 11"),
        ("--max-new-tokens 0", "--max-new-tokens 0"),
        ("--max-new-tokens 1", "--max-new-tokens 1: times are for tokens after the first, give at least 2"),
        ("--limit 0", "--limit 0"),
        ("--model FOLDER/none", "no such folder"),
        ("--weights int3", "--weights int3: choose one of int8, int4"),
        ("--threads 0", "--threads 0: must be at least 1"),
    ],
)
def test_mistakes_are_named_in_one_line(rates: Path, tmp_path: Path, arguments: str, named: str) -> None:
    files = {
        "high.json": '{"match_rates": {"4": {"1": 1.5}}, "num_layers": 8}',
        "deep.json": '{"match_rates": {"8": {"1": 0.5}}, "num_layers": 8}',
        "zero.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 0}',
        "cuts.json": '{"match_rates": {"4": {"1": 0.5}}, "first_boundary": '
        '[{"cuts": [4, 7], "shares": {"1": [0.5, 0.3, 0.2]}}]}',
        "bare.json": '{"match_rates": {"4": {"1": 0.5}}}',
        "int8.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 8, "weights": "int8"}',
        "three.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 8, "weights": "int3"}',
        "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    asked = f"--devices 4 {' '.join(TIMES)}"
    line = refused("plan", *arguments.replace("ASKED", asked).replace("FOLDER", str(tmp_path)).split())
    assert named.replace("FOLDER", str(tmp_path)) in line
    assert sorted(tmp_path.iterdir()) == before


def test_it_answers_without_importing_what_is_slow(rates: Path) -> None:
    code = """
import sys, typer
from ppd_runtime.cli.plan import plan
app = typer.Typer()
app.command()(plan)
app(sys.argv[1:], standalone_mode=False)
slow = {"torch", "transformers", "numpy", "matplotlib", "ray", "zmq"} & set(sys.modules)
assert not slow, slow
"""
    command = [sys.executable, "-c", code, "--match-rates", str(rates), *TIMES, "--devices", "4"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert output.returncode == 0, output.stderr
    assert "4 stages, k=3" in output.stdout


def test_weights_of_few_bits_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"match_rates": RATES, "num_layers": 8, "weights": "int8"}))
    assert "demo, int8 weights, 8 layers" in ppd("plan", "--match-rates", path, *TIMES, "--devices", 4).stdout
