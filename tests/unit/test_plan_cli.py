"""`ppd plan` where everything is given: nothing is measured, no model is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

import ppd_runtime.cli.plan
from ppd_runtime.calibration import planning
from ppd_runtime.cli.plan import plan
from ppd_runtime.cost_model.machine_costs import Calibration, read_calibration
from ppd_runtime.cost_model.planner import rank
from ppd_runtime.cost_model.tradeoff import read_match_rates

app = typer.Typer()
app.command()(plan)
TIMES = ("--layer-ms", "0.4", "--head-ms", "0.3", "--exit-head-ms", "0.3", "--hop-ms", "0.1")
RATES = {"3": {"1": 0.3, "3": 0.4}, "4": {"1": 0.6, "3": 0.8}, "7": {"1": 0.9, "3": 0.95}}


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """A file as `ppd match-rate` writes them."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"match_rates": RATES, "num_layers": 8}))
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many cores as these plans have devices, wherever the tests run."""
    for module in (planning, ppd_runtime.cli.plan):
        monkeypatch.setattr(module, "available_cores", lambda: 4)


def test_the_table_and_the_file(rates: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = invoke("--match-rates", rates, *TIMES, "--devices", 4, "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    given = {(4, 1): 0.6, (4, 3): 0.8, (7, 1): 0.9, (7, 3): 0.95}
    expected = rank(8, Calibration(0.4, 0.3, 0.3, 0.1), given, 4)
    assert expected.verdict in result.stdout
    assert "left out exit layers 3: Theorem 4.1 needs at least half depth" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    best = expected.plans[0]
    shown = [f"{best.ms_per_token:.3f}", f"{best.speedup:.2f}", f"{best.compute_per_token:.2f}"]
    assert ["1", "4", "3", "4", "0.800", *shown] in lines
    assert sum(line[:1] in (["ordinary"], ["tensor"]) for line in lines) == 1
    assert "Tensor parallelism was not measured and is not ranked" in result.stdout
    data = json.loads(out.read_text())
    assert (data["verdict"], len(data["plans"]), data["num_layers"]) == (expected.verdict, 4, 8)
    assert read_calibration(out) == Calibration(0.4, 0.3, 0.3, 0.1)
    assert read_match_rates(out).rates == given
    again = invoke("--match-rates", out, "--calibration", out, "--devices", 4)
    assert expected.verdict in again.stdout
    slower = invoke("--match-rates", out, "--calibration", out, "--devices", 4, "--hop-ms", 9)
    assert "don't" in slower.stdout
    fewer = invoke("--match-rates", rates, *TIMES, "--devices", 2, "--width", "3:1.1")
    assert "exit layer 4 with k=3, workers=1 on 2 devices" in fewer.stdout
    asked = invoke("--match-rates", rates, *TIMES, "--devices", 4, "--width", "3:1.1", "--workers", 2)
    assert "with k=3, workers=2 on 3 devices" in asked.stdout
    one = invoke("--match-rates", rates, *TIMES, "--k", 1, "--devices", 4)
    assert "k=1 on 2 devices" in one.stdout


def test_stages_are_ranked_where_their_first_boundaries_are_known(rates: Path, tmp_path: Path) -> None:
    boundaries = [
        {"cuts": [4], "shares": {"1": [0.6, 0.4], "3": [0.8, 0.2]}},
        {"cuts": [2, 4, 6], "shares": {"1": [0.3, 0.3, 0.2, 0.2], "3": [0.6, 0.2, 0.1, 0.1]}},
        {"cuts": [1, 2, 4, 6], "shares": {"3": [0.5, 0.1, 0.2, 0.1, 0.1]}},
    ]
    known, out, page = (tmp_path / name for name in ("known.json", "plan.json", "page.html"))
    known.write_text(json.dumps({**json.loads(rates.read_text()), "first_boundary": boundaries}))
    result = invoke("--match-rates", known, *TIMES, "--devices", 4, "--out", out, "--html", page)
    data = json.loads(out.read_text())
    assert [(row["devices"], row["cuts"], row["k"]) for row in data["staged"]] == [
        (4, [2, 4, 6], 3),
        (2, [4], 3),
        (4, [2, 4, 6], 1),
        (2, [4], 1),
    ]
    assert data["verdict"].startswith("4 stages (cut after layers 2, 4 and 6) with k=3, rows=8 on 4 devices: ")
    assert data["verdict"] in result.stdout
    assert sum(line.split()[1:2] == ["stages"] for line in result.stdout.splitlines()) == 4 + 1  # and the verdict
    assert data["first_boundary"] == boundaries
    assert read_match_rates(out).first_boundary == read_match_rates(known).first_boundary
    assert '"staged":[{' in page.read_text()
    one = json.loads(invoke("--match-rates", known, *TIMES, "--devices", 4, "--k", 1, "--json").stdout)
    assert {row["k"] for row in one["staged"]} == {1}
    assert json.loads(invoke("--match-rates", rates, *TIMES, "--json").stdout)["staged"] == []
    beside = ("--devices", 4, "--rows", 1, "--all-reduce-ms", 0.01)
    narrow = json.loads(invoke("--match-rates", known, *TIMES, *beside, "--json").stdout)
    assert {row["rows"] for row in data["staged"]} == {1, 8}
    assert {row["rows"] for row in narrow["staged"]} == {1}
    assert narrow["staged"][0]["ms_per_token"] > data["staged"][0]["ms_per_token"]
    assert {row["source"] for row in narrow["parallel"]} == {"all-reduces of 0.01 ms"}
    assert "tensor parallelism on 2 devices is faster" in narrow["verdict"]


def test_the_verdict_tells_of_missing_devices_and_of_load(rates: Path, tmp_path: Path) -> None:
    """As on two busy cores: what others published for GPUs is not recommended beside what was measured."""
    times = {"layer_ms": 0.4, "parallel_speedups": {"2": 0.06}, "devices": 2, "cpu_share": 0.55}
    known, out, page = (tmp_path / name for name in ("times.json", "plan.json", "page.html"))
    known.write_text(json.dumps(times))
    result = invoke("--match-rates", rates, "--calibration", known, "--devices", 4, "--out", out, "--html", page)
    data = json.loads(out.read_text())
    assert [(row["devices"], row["speedup"], row["source"]) for row in data["parallel"]] == [(2, 0.06, "measured")]
    assert "tensor parallelism" not in data["verdict"]
    assert sum("tensor" in line for line in result.stdout.splitlines()) == 1
    devices, load = data["cautions"]
    assert devices.startswith("The plan may have 4 devices, but there are 2: ")
    assert (
        load == "Measuring had 55% of the CPU time that it could use: others were computing as well. Times are rough."
    )
    assert data["verdict"].endswith(f". {devices} {load}")
    assert data["verdict"] in result.stdout
    assert json.dumps(data["verdict"]) in page.read_text()
    quiet = invoke("--match-rates", rates, "--calibration", known, "--devices", 2)
    assert "The plan may have" not in quiet.stdout


def test_devices_of_a_machine_that_nobody_described_are_those_here(rates: Path) -> None:
    assert (
        "The plan may have 5 devices, but there are 4." in invoke("--match-rates", rates, *TIMES, "--devices", 5).stdout
    )
    assert "but there are 2" in invoke("--match-rates", rates, *TIMES, "--devices", 4, "--threads", 2).stdout
    assert "The plan may" not in invoke("--match-rates", rates, *TIMES, "--devices", 9, "--device", "cuda").stdout


def test_a_model_name_cannot_end_the_script(rates: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    name = "</script><script>alert(1)</script>"
    assert invoke("--match-rates", rates, *TIMES, "--html", page, "--model", name).exit_code == 0
    text = page.read_text()
    assert (text.count("<script"), text.count("</script>")) == (1, 1)
    assert "http://" not in text
    assert "https://" not in text
    assert sorted(tmp_path.iterdir()) == sorted([page, rates])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--match-rates FOLDER/high.json TIMES", "match_rates[4][1]=1.5: give a number from 0 to 1"),
        ("--match-rates FOLDER/deep.json TIMES", "deep.json: exit layer 8 is not before the last of 8 layers"),
        ("--match-rates FOLDER/cuts.json --layers 6 TIMES", "cuts='4,7': with 6 layers give layers from 1 to 5"),
        ("--match-rates FOLDER/zero.json TIMES", "zero.json: num_layers=0: give a whole number of at least 2"),
        ("--match-rates FOLDER/rates.json TIMES --layers 6", "--layers 6, but FOLDER/rates.json is of 8 layers"),
        ("--match-rates FOLDER/rates.json TIMES --layers 0", "--layers 0"),
        ("--match-rates FOLDER/bare.json TIMES", "does not say how many layers the model has: give --layers"),
        ("--match-rates FOLDER/rates.json TIMES --k 2", "no match rate for exit layer 4 with --k 2"),
        ("--match-rates FOLDER/rates.json TIMES --k 0", "--k 0"),
        ("--match-rates FOLDER/rates.json TIMES --hop-ms -1", "--hop-ms -1.0: give a finite number of at least 0"),
        ("--match-rates FOLDER/rates.json TIMES --workers 0", "--workers 0"),
        ("--match-rates FOLDER/rates.json TIMES --workers two", "--workers two"),
        ("--match-rates FOLDER/rates.json TIMES --workers 1", "nothing says what a pass over 3 candidates takes; give"),
        ("--match-rates FOLDER/rates.json TIMES --width 3", "--width 3: give NUMBER:FACTOR"),
        ("--match-rates FOLDER/rates.json TIMES --width 3:0.5", "width of 3 candidates=0.5"),
        ("--layer-ms 0", "--layer-ms 0"),
        ("--match-rates FOLDER/none.json TIMES", "No such file"),
        ("--calibration FOLDER/rates.json", "not a calibration"),
        ("--calibration FOLDER/none.json", "No such file"),
        ("--match-rates FOLDER/rates.json TIMES --devices 0", "--devices 0"),
        ("--tensor-parallel-efficiency 1.5", "--tensor-parallel-efficiency 1.5"),
        ("--all-reduce-ms -1", "--all-reduce-ms -1"),
        ("--all-reduce-ms 0.1 --tensor-parallel-efficiency 0.5", "both say how fast tensor parallelism is, drop one"),
        ("--match-rates FOLDER/rates.json TIMES --rows 0", "--rows 0"),
        ("--match-rates FOLDER/rates.json TIMES --rows two", "--rows two"),
        ("--html FOLDER/none/page.html", "give a file in a folder that exists"),
        ("--out FOLDER", "give a file in a folder that exists"),
        ("--prompts FOLDER/broken.jsonl --html FOLDER/page.html", "broken.jsonl, line 2: no JSON at column 11"),
        ("--max-new-tokens 0", "--max-new-tokens 0"),
        ("--max-new-tokens 1", "--max-new-tokens 1: a plan is for tokens after the first"),
        ("--limit 0", "--limit 0"),
        ("--model FOLDER/none", "no such folder"),
        ("--match-rates FOLDER/rates.json TIMES --weights int3", "--weights int3: choose one of int8, int4"),
        ("--match-rates FOLDER/rates.json TIMES --threads 0", "--threads 0: must be at least 1"),
        (
            "--match-rates FOLDER/int8.json TIMES --weights int4",
            "int8.json was measured with weights in int8, and model 'demo' has them in int4: give figures that were",
        ),
        ("--match-rates FOLDER/int8.json", "with weights in int8, and model 'demo' has them in floats"),
        ("--calibration FOLDER/int8.json --weights int4", "with weights in int8, and model 'demo' has them in int4"),
        (
            "--match-rates FOLDER/floats.json --calibration FOLDER/int8.json",
            "floats.json was measured with weights in floats, and FOLDER/int8.json has them in int8: give",
        ),
        ("--match-rates FOLDER/three.json TIMES", "three.json: weights='int3': choose one of floats, int8, int4"),
        ("--calibration FOLDER/three.json", "three.json: weights='int3': choose one of floats, int8, int4"),
        (
            "--calibration FOLDER/eager.json --compile",
            "--compile: FOLDER/eager.json was measured without; leave out one",
        ),
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
        "int8.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 8, "weights": "int8", '
        '"calibration": {"layer_ms": 1, "weights": "int8"}}',
        "floats.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 8, "weights": "floats"}',
        "three.json": '{"match_rates": {"4": {"1": 0.5}}, "num_layers": 8, "weights": "int3", '
        '"calibration": {"layer_ms": 1, "weights": "int3"}}',
        "eager.json": '{"layer_ms": 1, "compiled": false}',
        "broken.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    result = invoke(*arguments.replace("TIMES", " ".join(TIMES)).replace("FOLDER", str(tmp_path)).split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named.replace("FOLDER", str(tmp_path)) in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_it_answers_without_importing_what_is_slow(rates: Path) -> None:
    code = """
import sys, typer
import ppd_runtime.cli.plan
from ppd_runtime.calibration import planning
from ppd_runtime.cli.plan import plan
app = typer.Typer()
app.command()(plan)
app(sys.argv[1:], standalone_mode=False)
slow = {"torch", "transformers", "numpy", "matplotlib", "ray", "zmq"} & set(sys.modules)
assert not slow, slow
"""
    command = [
        sys.executable,
        "-c",
        code,
        "--match-rates",
        str(rates),
        *TIMES,
        "--devices",
        "4",
        "--html",
        str(rates.with_name("a.html")),
    ]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert output.returncode == 0, output.stderr
    assert "on 4 devices" in output.stdout


def test_what_a_device_has_no_memory_for_is_left_out(rates: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "page.html"
    boundaries = [
        {"cuts": [4], "shares": {"3": [0.8, 0.2]}},
        {"cuts": [2, 4, 6], "shares": {"3": [0.6, 0.2, 0.1, 0.1]}},
    ]
    rates.write_text(json.dumps({**json.loads(rates.read_text()), "first_boundary": boundaries}))
    sizes = ("--layer-mb", 1000, "--head-mb", 200, "--entry-kb", 100, "--cache-tokens", 1000)
    asked = ("--match-rates", rates, *TIMES, "--devices", 4, *sizes)
    result = invoke(*asked, "--memory-gb", 3, "--out", out, "--html", page)
    data = json.loads(out.read_text())
    assert [(row["devices"], row["memory_gb"]) for row in data["staged"]] == [(4, 2 * 1.1 + 0.4)]
    assert (data["plans"], data["ordinary"]["fits"], data["ordinary"]["memory_gb"]) == ([], False, 9.2)
    left_out = "Too little memory, for a device has 3 GB: ordinary decoding (9.2 GB), the paper's layout (9.2 GB), "
    assert f"{left_out}2 stages (4.8 GB)." in result.stdout
    assert "ordinary, too large" in result.stdout
    assert read_calibration(out).memory.device == 3e9
    again = json.loads(
        invoke("--match-rates", out, "--calibration", out, "--memory-gb", 5, "--devices", 4, "--json").stdout
    )
    assert {row["devices"] for row in again["staged"]} == {2, 4}
    assert "GB" not in invoke("--match-rates", rates, *TIMES, "--devices", 4).stdout
    mistake = invoke("--match-rates", rates, *TIMES, "--memory-gb", 3)
    assert (mistake.exit_code, mistake.stderr.count("\n")) == (2, 1)
    assert "--memory-gb 3: nothing says how large a layer is; give a layer's size too" in mistake.stderr


def test_what_is_kept_names_the_weights(rates: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "page.html"
    asked = ("--match-rates", rates, *TIMES, "--devices", 4, "--out", out, "--html", page)
    assert "weights" not in invoke(*asked).stdout
    assert (read_calibration(out).weights, read_match_rates(out).weights) == (None, None)
    assert "demo, int8 weights, 8 layers" in invoke(*asked, "--weights", "int8").stdout
    assert (read_calibration(out).weights, read_match_rates(out).weights) == ("int8", "int8")
    assert '"weights":"int8"' in page.read_text()
    again = invoke("--match-rates", out, "--calibration", out, "--devices", 4)
    assert "demo, int8 weights, 8 layers" in again.stdout, "the files say so"
