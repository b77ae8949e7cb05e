"""`ppd tradeoff` and the rows and files behind it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ppd, refused

from ppd_runtime.cost_model import staged, theory
from ppd_runtime.files.atomic import atomic_file

INPUTS = {"num_layers", "exit_layer", "k", "match_rate", "num_new_tokens"}
KEYS = {"latency_units", "latency_ratio", "speedup", "compute_units", "compute_per_token", "compute_per_time"}
MEASURED = {"match_rates": {"20": {"1": 0.5281, "3": 0.6837, "5": 0.7415}, "30": {"3": 0.8749}}, "model": "Vicuna-13B"}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A file of match rates, from Table 2's trained rows for SQuAD."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(MEASURED))
    return path


def _run(*arguments: str) -> str:
    result = ppd("tradeoff", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def _json(*arguments: str):
    return json.loads(_run(*arguments, "--json"))


def test_one_setting_is_one_object() -> None:
    row = _json()
    assert set(row) == INPUTS | KEYS
    assert [row[name] for name in ("num_layers", "exit_layer", "k", "num_new_tokens")] == [40, 20, 3, 128]
    assert row["latency_units"] == pytest.approx(40 * 128 - 20 * 127 * 0.6837)
    assert row["latency_ratio"] == pytest.approx(row["latency_units"] / (40 * 128))
    assert row["speedup"] == pytest.approx(1 / row["latency_ratio"])
    assert row["compute_units"] == pytest.approx(row["latency_units"] + 3 * 20 * 128)
    assert row["compute_per_token"] == pytest.approx(row["compute_units"] / (40 * 128))
    assert row["compute_per_time"] == pytest.approx(row["compute_units"] / row["latency_units"])


def test_times_add_the_time_per_token() -> None:
    row = _json("--layer-ms", "2", "--head-ms", "3", "--exit-head-ms", "4", "--hop-ms", "1")
    assert set(row) == INPUTS | KEYS | {"latency_ms_per_token"}
    expected = theory.expected_time(40, 20, 0.6837, 128, theory.Times(2, 3, 4, 1)) / 128
    assert row["latency_ms_per_token"] == pytest.approx(expected)


def test_lists_give_every_combination() -> None:
    rows = _json("--k", "1,3", "--exit-layer", "20,30", "--match-rate", "0.5,0.7")
    settings = [(row["exit_layer"], row["k"], row["match_rate"]) for row in rows]
    assert settings == [(d, k, p) for d in (20, 30) for k in (1, 3) for p in (0.5, 0.7)]


def test_measured_rates(measured: Path) -> None:
    rows = _json("--match-rates", str(measured))
    settings = [(row["exit_layer"], row["k"], row["match_rate"]) for row in rows]
    assert settings == [(20, 1, 0.5281), (20, 3, 0.6837), (20, 5, 0.7415), (30, 3, 0.8749)]
    rows = _json("--match-rates", str(measured), "--k", "3", "--exit-layer", "30,20")
    assert [row["match_rate"] for row in rows] == [0.8749, 0.6837]
    assert _json("--match-rates", str(measured), "--k", "5", "--exit-layer", "20")["match_rate"] == 0.7415
    assert [row["k"] for row in _json("--match-rates", str(measured), "--exit-layer", "20")] == [1, 3, 5]


def test_a_file_of_every_exit_layer_says_how_deep_the_model_is(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    rates = {str(layer): {"1": layer / 10} for layer in range(1, 6)}
    path.write_text(json.dumps({"match_rates": rates, "num_layers": 6}))
    for arguments in ([], ["--layers", "6"]):
        result = ppd("tradeoff", "--match-rates", path, "--json", *arguments)
        rows = json.loads(result.stdout)
        assert [(row["num_layers"], row["exit_layer"]) for row in rows] == [(6, 3), (6, 4), (6, 5)]
        assert result.stderr == f"ppd: left out exit layers 1, 2 of {path}: Theorem 4.1 needs at least half depth\n"
    assert _json("--match-rates", str(path), "--exit-layer", "4")["match_rate"] == 0.4


def test_table() -> None:
    output = _run("--k", "1,3,5", "--layer-ms", "2")
    assert "40 layers, 128 tokens" in output
    assert output.count("0.661") == 3
    assert "ms/token" in output
    assert max(map(len, output.splitlines())) <= 80


SHARES = (0.8, 0.1, 0.05, 0.05)
STAGED = {"num_layers", "stages", "cuts", "k", "first_boundary", "num_new_tokens", "rows_per_token"}
STAGED_KEYS = {"expected_first_boundary", "speedup_bound", "latency_ratio", "speedup", "compute_per_token"}
BOUNDARIES = {
    "match_rates": {"6": {"1": 0.8, "3": 0.95}},
    "num_layers": 12,
    "first_boundary": [
        {"cuts": [6], "shares": {"1": [0.8, 0.2], "3": [0.95, 0.05]}},
        {"cuts": [3, 6, 9], "shares": {"3": list(SHARES)}},
        {"cuts": [2, 5, 9], "shares": {"3": [0.7, 0.2, 0.05, 0.05]}},
    ],
}


@pytest.fixture
def boundaries(tmp_path: Path) -> Path:
    """A file with first boundaries."""
    path = tmp_path / "boundaries.json"
    path.write_text(json.dumps(BOUNDARIES))
    return path


def test_stages_with_given_shares() -> None:
    row = _json("--layers", "12", "--stages", "4", "--first-boundary", ".8,.1,.05,.05")
    assert set(row) == STAGED | STAGED_KEYS | {"tensor_parallel_speedups"}
    assert (row["cuts"], row["first_boundary"], row["k"]) == ([3, 6, 9], list(SHARES), 3)
    assert row["expected_first_boundary"] == pytest.approx(1.35)
    assert row["speedup_bound"] == pytest.approx(4 / 1.35)
    assert row["latency_ratio"] == pytest.approx((4 + 127 * 1.35) / (128 * 4))
    assert row["speedup"] == pytest.approx(1 / row["latency_ratio"])
    assert row["rows_per_token"] == pytest.approx(3 * 1.3 - 0.95)
    assert row["compute_per_token"] == pytest.approx(1 + row["rows_per_token"] * 0.75)
    low, high = row["tensor_parallel_speedups"]
    layer = staged.GPT_FAST_LAYER_MS
    assert low == pytest.approx(12 * layer / (3 * layer + 24 * 0.029))
    assert high == pytest.approx(12 * layer / (3 * layer + 24 * 0.018))


def test_several_numbers_of_stages_have_shares_of_their_own() -> None:
    asked = ("--layers", "12", "--k", "1,3")
    rows = _json(*asked, "--stages", "2,4", "--first-boundary", ".9,.1;.8,.1,.05,.05")
    two = _json(*asked, "--stages", "2", "--first-boundary", ".9,.1")
    assert rows == [*two, *_json(*asked, "--stages", "4", "--first-boundary", ".8,.1,.05,.05")]
    assert [(row["stages"], row["k"]) for row in rows] == [(2, 1), (2, 3), (4, 1), (4, 3)]


def test_times_and_rows_of_stages() -> None:
    asked = ("--layers", "12", "--stages", "4", "--first-boundary", ".8,.1,.05,.05")
    times = ("--layer-ms", "2", "--head-ms", "3", "--exit-head-ms", "4", "--hop-ms", "1", "--all-reduce-ms", "0.1")
    row = _json(*asked, *times, "--rows-per-token", "6")
    token = 7 * 1.35 + 0.95 * 4 + 0.05 * 3
    assert row["latency_ms_per_token"] == pytest.approx((31 + 127 * token) / 128)
    assert row["latency_ratio"] == pytest.approx(row["latency_ms_per_token"] / 27)
    assert row["tensor_parallel_speedups"] == [pytest.approx(27 / (6 + 2.4 + 3))] * 2
    assert row["compute_per_token"] == pytest.approx(1 + 6 * 0.75)
    shown = _run(*asked, *times)
    assert "all-reduces of 0.1 ms" in " ".join(shown.split())
    assert f"{row['latency_ms_per_token']:.3f}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_stages_from_measured_first_boundaries(boundaries: Path) -> None:
    rows = _json("--stages", "4,2", "--match-rates", str(boundaries))
    settings = [(row["stages"], row["cuts"], row["k"]) for row in rows]
    assert settings == [(4, [2, 5, 9], 3), (4, [3, 6, 9], 3), (2, [6], 1), (2, [6], 3)]
    assert rows[1]["first_boundary"] == list(SHARES)
    assert rows[0]["latency_ratio"] == pytest.approx((4 + 127 * 1.45) * 4 / (128 * 12))  # the longest has 4 of 12
    assert [row["k"] for row in _json("--stages", "4,2", "--match-rates", str(boundaries), "--k", "3")] == [3, 3, 3]
    assert "2,5,9" in _run("--stages", "2,4", "--match-rates", str(boundaries))


def test_one_stage_has_a_line_for_each_number_of_rows() -> None:
    asked = ("--stages", "1", "--chances", ".5,.4,.3")
    rows = _json(*asked, "--row-cost", ".1", "--draft-cost", ".05")
    assert [(row["rows"], row["chances"]) for row in rows] == [(count, [0.5, 0.4, 0.3]) for count in range(1, 5)]
    assert [row["tokens_per_pass"] for row in rows] == pytest.approx([1, 1.5, 1.7, 1.76])
    assert [row["speedup"] for row in rows] == pytest.approx([1 / 1.05, 1.5 / 1.15, 1.7 / 1.25, 1.76 / 1.35])
    assert _json(*asked)[-1]["speedup"] == pytest.approx(1.76), "without costs"
    shown = _run(*asked, "--row-cost", ".1")
    assert "rows  tokens a pass  speed-up" in shown
    assert "1.760     1.354" in shown


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--stages 1", "--stages 1: give --chances"),
        ("--stages 2 --chances .5", "--stages 2 and --chances .5: that option is for --stages 1"),
        ("--chances .5", "--chances .5: is the staged layout's, give --stages as well"),
        ("--stages 1 --chances 1.5", "--chances 1.5: give a number from 0 to 1"),
        ("--stages 1 --chances .5,x", "--chances .5,x: give numbers with commas between them"),
        ("--stages 1 --chances .5 --row-cost -1", "--row-cost -1"),
        ("--stages 1 --chances .5 --k 3", "--chances .5: --k has no part in it, leave it out"),
        ("--stages 1 --chances .5 --first-boundary .5,.5", "--chances .5: --first-boundary has no part in it"),
        ("--stages 2 --first-boundary .8,.2 --row-cost .1", "--row-cost 0.1: needs --chances as well, give it too"),
        ("--stages 1 --first-boundary 1", "--stages 1: give a whole number of at least 2"),
        ("--stages 41 --first-boundary .5,.5", "--stages 41: with 40 layers choose 2 to 40"),
        ("--stages 4 --first-boundary .8,.2", "--first-boundary 0.8,0.2: 4 stages need 4 shares"),
        ("--stages 2 --first-boundary .8,.1", "--first-boundary 0.8,0.1: the shares sum to 0.9, give shares that sum"),
        ("--stages 2 --first-boundary 1.2,-.2", "--first-boundary 1.2: give a number from 0 to 1"),
        ("--stages 2 --first-boundary .8,x", "--first-boundary .8,x: give numbers with commas between them"),
        ("--stages two --first-boundary .8,.2", "--stages two: give whole numbers"),
        ("--stages 2,4 --first-boundary .8,.2", "--stages 2,4 with --first-boundary .8,.2: give shares for each"),
        ("--stages 2 --first-boundary .8,.2;.8,.2", "with ';' between; or `ppd match-rate --stages 2` measures them"),
        ("--stages 4,2 --first-boundary .8,.2;.8,.2", "--first-boundary 0.8,0.2: 4 stages need 4 shares"),
        ("--stages 2", "--stages 2: give one of --first-boundary and --match-rates"),
        ("--stages 2 --first-boundary .8,.2 --match-rates FOLDER/good.json", "give one of"),
        ("--stages 2 --first-boundary .8,.2 --exit-layer 20", "--stages 2 and --exit-layer 20"),
        (
            "--stages 2 --first-boundary .8,.2 --match-rate 0.5",
            "--stages 2 and --match-rate 0.5: that option is the paper's layout's, leave one of them out",
        ),
        ("--stages 2 --first-boundary .8,.2 --k 0", "--k 0"),
        ("--stages 2 --first-boundary .8,.2 --tokens 0", "--tokens 0"),
        ("--stages 2 --first-boundary .8,.2 --rows-per-token -1", "--rows-per-token -1"),
        ("--stages 2 --first-boundary .8,.2 --all-reduce-ms 0.1", "--all-reduce-ms 0.1: needs --layer-ms as well"),
        ("--stages 2 --first-boundary .8,.2 --layer-ms 1 --all-reduce-ms -1", "--all-reduce-ms -1"),
        ("--first-boundary .8,.2", "--first-boundary .8,.2: is the staged layout's, give --stages as well"),
        ("--rows-per-token 3", "--rows-per-token 3.0: is the staged layout's"),
        ("--stages 3 --match-rates FOLDER/good.json", "no first boundaries of 3 stages; it has those of 2, 4, and"),
        ("--stages 2 --match-rates FOLDER/bare.json", "bare.json: no first boundaries of 2 stages; `ppd match-rate"),
        ("--stages 4 --k 1 --match-rates FOLDER/good.json", "of 4 stages with --k 1: choose among 3"),
        ("--stages 13 --match-rates FOLDER/good.json", "--stages 13: with 12 layers choose 2 to 12"),
        ("--stages 2 --match-rates FOLDER/sum.json", "first_boundary='0.8,0.1': the shares sum to 0.9"),
        ("--stages 2 --match-rates FOLDER/count.json", "2 stages need 2 shares"),
        ("--stages 2 --match-rates FOLDER/order.json", "cuts='6,3': with 12 layers give layers from 1 to 11"),
        ("--stages 2 --match-rates FOLDER/deep.json", "cuts='12': with 12 layers"),
        ("--stages 2 --match-rates FOLDER/text.json", "cuts='x': give a whole number"),
        ("--stages 2 --match-rates FOLDER/odd.json", "its form is"),
    ],
)
def test_mistakes_with_stages_are_named_in_one_line(tmp_path: Path, arguments: str, named: str) -> None:
    rows = {
        "sum": [{"cuts": [6], "shares": {"1": [0.8, 0.1]}}],
        "count": [{"cuts": [6], "shares": {"1": [0.8, 0.1, 0.1]}}],
        "order": [{"cuts": [6, 3], "shares": {"1": [0.8, 0.1, 0.1]}}],
        "deep": [{"cuts": [12], "shares": {"1": [0.8, 0.2]}}],
        "text": [{"cuts": ["x"], "shares": {"1": [0.8, 0.2]}}],
        "odd": [{"cuts": 6, "shares": {"1": [0.8, 0.2]}}],
        "bare": [],
    }
    for name, boundaries in {**rows, "good": BOUNDARIES["first_boundary"]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**BOUNDARIES, "first_boundary": boundaries}))
    before = sorted(tmp_path.iterdir())
    assert named in refused("tradeoff", *arguments.replace("FOLDER", str(tmp_path)).split())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--match-rate 1.5", "--match-rate 1.5"),
        ("--match-rate nan", "--match-rate nan"),
        ("--match-rate 0.5,", "--match-rate 0.5,"),
        ("--k 1,x", "--k 1,x: give whole numbers with commas between them"),
        ("--k 0", "--k 0"),
        ("--exit-layer 19", "--exit-layer 19: with 40 layers choose 20 to 39"),
        ("--layers 1", "--layers 1"),
        ("--tokens 0", "--tokens 0"),
        ("--layer-ms -1", "--layer-ms -1"),
        ("--hop-ms 1", "need --layer-ms"),
        ("--match-rates FOLDER/none.json", "No such file"),
        ("--match-rates FOLDER/bad.json", "its form is"),
        ("--match-rates FOLDER/high.json", "match_rates[20][3]=1.5"),
        ("--match-rates FOLDER/empty.json", "holds no match rates"),
        ("--match-rates FOLDER/good.json --k 4", "no match rate for exit layer 20 with --k 4: choose among 20/3"),
        ("--match-rates FOLDER/good.json --match-rate 0.5", "give one of them"),
        ("--match-rates FOLDER/deep.json --layers 40", "--layers 40, but FOLDER/deep.json is of 48 layers"),
        ("--match-rates FOLDER/deep.json", "deep.json: no exit layer at half depth or behind"),
        ("--match-rates FOLDER/good.json --layers 20", "exit layer 20 is not before the last of 20 layers"),
        ("--match-rates FOLDER/odd.json", "num_layers='6': give a whole number of at least 2"),
        ("--out FOLDER/none/rows.json", "give a file in a folder that exists"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, arguments: str, named: str) -> None:
    texts = {"bad": "[1]", "high": '{"match_rates": {"20": {"3": 1.5}}}', "empty": '{"match_rates": {}}'}
    texts["deep"] = '{"match_rates": {"20": {"3": 0.5}}, "num_layers": 48}'
    texts["odd"] = '{"match_rates": {"20": {"3": 0.5}}, "num_layers": "6"}'
    for name, text in {**texts, "good": '{"match_rates": {"20": {"3": 0.5}}}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    before = sorted(tmp_path.iterdir())
    line = refused("tradeoff", *arguments.replace("FOLDER", str(tmp_path)).split())
    assert named.replace("FOLDER", str(tmp_path)) in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_file(path) as unfinished:
        unfinished.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_answers_without_importing_what_is_slow() -> None:
    code = """
import sys, typer
from ppd_runtime.cli.tradeoff import tradeoff
app = typer.Typer()
app.command()(tradeoff)
app(["--json"], standalone_mode=False)
slow = {"torch", "transformers", "numpy", "matplotlib", "ray", "zmq"} & set(sys.modules)
assert not slow, slow
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout)["k"] == 3
