"""The staged layout's machines on virtual clocks, over texts whose first boundaries are drawn."""

import json

import pytest
import typer
from typer.testing import CliRunner

from ppd_runtime.calibration.simulate_stages import (
    StagedSetting,
    VirtualRowStage,
    predict_stages,
    simulate_staged_runs,
    summarise_staged,
)
from ppd_runtime.calibration.simulated_cluster import Clock
from ppd_runtime.calibration.simulated_stages import StageTimes
from ppd_runtime.cli.simulate import simulate as command

app = typer.Typer()
app.command()(command)
SHARES = (0.7, 0.15, 0.1, 0.05)
CUTS = (3, 6, 9)


def simulated(setting, shares, runs=2):
    return summarise_staged(setting, simulate_staged_runs(setting, shares, runs))


def test_one_candidate_at_a_time_takes_what_the_formula_says():
    setting = StagedSetting(12, CUTS, k=1, rows=1, num_new_tokens=60)
    found = simulated(setting, SHARES)
    shares = [count / 59 for count in found.first_boundary]
    predicted = predict_stages(setting, shares)
    assert found.time_per_token == pytest.approx(predicted.time_per_token, rel=0.02)
    assert found.first_boundary == pytest.approx(predicted.first_boundary)


def test_what_nobody_names_takes_ordinary_decodings_time():
    setting = StagedSetting(12, CUTS, k=3, rows=8, num_new_tokens=20)
    found = simulated(setting, (0, 0, 0, 1), runs=1)
    assert found.ratio == 1
    assert found.first_boundary == (0, 0, 0, 19)


def test_room_for_more_rows_is_faster_where_rows_cost_nothing_and_left_empty_where_they_cost_passes():
    few, many, dear = (
        simulated(StagedSetting(12, CUTS, 3, rows, 40, StageTimes(row_cost=cost)), SHARES)
        for rows, cost in ((1, 0.0), (8, 0.0), (8, 1.0))
    )
    assert many.time_per_token < 0.85 * few.time_per_token
    assert many.rows_per_token > few.rows_per_token
    assert (dear.time_per_token, dear.rows_per_token) == (few.time_per_token, few.rows_per_token)


@pytest.mark.parametrize(
    "slower",
    [
        {"slow": {2: 2.0}},
        {"slow_links": {0: 8.0}},
        {"times": StageTimes(hop=2.0)},
        {"times": StageTimes(hop=0.25, besides=1)},
        {"jitter": 0.5},
    ],
)
def test_what_slows_a_stage_down_slows_the_text_down(slower):
    times = {"times": StageTimes(hop=0.25)}
    even, uneven = (simulated(StagedSetting(12, CUTS, 3, 8, 40, **(times | more)), SHARES) for more in ({}, slower))
    assert uneven.time_per_token > 1.1 * even.time_per_token
    assert uneven.first_boundary == pytest.approx(even.first_boundary, abs=10)


def test_a_node_runs_behind_what_it_stands_behind():
    stage = VirtualRowStage(3, Clock(1.0, 1.0, 0.0, None), StageTimes())
    stage.run_rows([7], [[1]], range(3))
    stage.run_rows([8, 9], [[1, 2], [1, 2, 3]], range(3))
    assert (stage.rows, stage.layer_passes) == (3, 9)
    stage.drop(2)
    with pytest.raises(RuntimeError, match="node 4 runs before"):
        stage.run_rows([5], [[1, 2, 4]], range(3))


def test_command_prints_predicted_beside_simulated():
    arguments = "--layers 12 --stages 2 --k 1 --first-boundary 1,0 --tokens 31 --runs 1 --layer-ms 2"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    lines = {line.split("│")[1].strip(): line.split("│")[2:4] for line in result.stdout.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["tokens first named at boundary 1"]] == ["30.0", "30.0"]
    assert [cell.strip() for cell in lines["latency, ms per token"]] == ["12.387", "12.387"]
    assert "a layer takes 2 ms, a hop 0 ms, a further row of a pass 0 of the first" in " ".join(result.stdout.split())


def test_command_prints_json_and_takes_a_file_of_measured_shares(tmp_path):
    file = tmp_path / "rates.json"
    rows = [{"cuts": list(cuts), "shares": {"3": list(SHARES)}} for cuts in (CUTS, (2, 5, 9))]
    file.write_text(json.dumps({"num_layers": 12, "match_rates": {"6": {"3": 0.9}}, "first_boundary": rows}))
    options = f"--stages 4 --match-rates {file} --tokens 20 --runs 2 --rows 4 --row-cost 0.1 --hop-ms 0.5 --json"
    chosen = CliRunner().invoke(app, [*options.split(), "--cuts", "2,5,9"])
    assert chosen.exit_code == 0, chosen.output
    output = json.loads(chosen.stdout)
    assert (output["num_layers"], output["cuts"], output["k"], output["rows"]) == (12, [2, 5, 9], 3, 4)
    assert (output["times"]["row_cost"], output["times"]["hop"], output["shares"]) == (0.1, 0.5, list(SHARES))
    assert sum(output["simulated"]["first_boundary"]) == 19
    assert output["predicted"]["time_per_token"] < output["simulated"]["time_per_token"]
    both = CliRunner().invoke(app, options.split())
    assert both.exit_code == 2
    assert "has 4 stages cut at 2,5,9 and 3,6,9, give --cuts" in both.stderr
    other = CliRunner().invoke(app, [*options.split(), "--cuts", "1,5,9"])
    assert f"--cuts 1,5,9: not in {file}" in other.stderr


STAGES = "--stages 3 --first-boundary .5,.3,.2"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (f"{STAGES} --exit-layer 6", "--stages 3 and --exit-layer 6: that option is the paper's layout's"),
        (f"{STAGES} --workers 2", "--stages 3 and --workers 2"),
        (f"{STAGES} --match-rate 0.5", "--stages 3 and --match-rate 0.5"),
        (f"{STAGES} --width 2", "--stages 3 and --width 2.0"),
        (f"{STAGES} --no-run-ahead", "--stages 3 and --no-run-ahead: that"),
        ("--cuts 3,6", "--cuts 3,6: is the staged layout's, give --stages as well"),
        ("--rows 2", "--rows 2: is the staged layout's"),
        ("--row-cost 0", "--row-cost 0.0: is the staged layout's"),
        ("--first-boundary .5,.5", "--first-boundary .5,.5: is the staged layout's"),
        ("--stages 3", "--stages 3: give one of --first-boundary and --match-rates"),
        ("--stages 1 --first-boundary 1", "--stages 1: "),
        ("--stages 4 --first-boundary .5,.5", "--first-boundary 0.5,0.5: 4 stages need 4 shares"),
        (f"{STAGES} --cuts 9", "--cuts 9 with --stages 3: 3 stages have 2 borders"),
        (f"{STAGES} --cuts 9,5", "--cuts 9,5: with 40 layers"),
        (f"{STAGES} --rows 0", "--rows 0: "),
        (f"{STAGES} --row-cost -1", "--row-cost -1.0: "),
        (f"{STAGES} --tokens 1", "--tokens 1: "),
        (f"{STAGES} --layer-ms 0", "--layer-ms 0: "),
        (f"{STAGES} --slow 3:2", "rank=3: with 3 stages choose 1 to 2, 0 is the last"),
    ],
)
def test_command_names_mistakes_in_one_line(arguments, named):
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
