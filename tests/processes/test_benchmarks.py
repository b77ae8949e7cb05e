"""Each benchmark once, as small as it goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import siblings
from benchmarks.__main__ import report

ROOT = Path(__file__).parents[2]


def figures(tmp_path, command):
    """Run a benchmark as people do; its figures."""
    path = tmp_path / "figures.json"
    arguments = [sys.executable, "-m", *command.split(), "--json", str(path)]
    subprocess.run(arguments, cwd=ROOT, check=True, timeout=240, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


@pytest.mark.parametrize("launcher", ["processes", "ray"])
def test_pipeline(tmp_path, launcher):
    options = f"--model random:64x4 --match-rate 1 --tokens 6 --rounds 1 --emulate-layer-ms 5 --launcher {launcher}"
    found = figures(tmp_path, f"benchmarks.pipeline {options}")
    assert found["identical"]
    assert found["emulated_layer_ms"] == 5
    assert sum(found["ledger_ms"]["ordinary"].values()) >= 20
    assert found["autoregressive_ms"] >= 20
    assert found["launcher"] == launcher
    assert {"ppd_ms", "ratio", "predicted_ratio", "realised_saving", "match_rate", "k"} <= set(found)


def test_hop(tmp_path):
    rows = figures(tmp_path, "benchmarks.hop --sizes 1024,200000 --pauses-ms 1 --count 10")["rows"]
    assert [(row["transport"], row["num_bytes"]) for row in rows] == [
        (transport, size) for transport in ("unix", "zeromq") for size in (1024, 200000)
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] and row["sender_us"] > 0 for row in rows)


def test_equal_devices(tmp_path):
    command = "benchmarks.equal_devices --model random:64x4 --match-rate 0.5 --tokens 6 --rounds 1"
    rows = figures(tmp_path, command)["rows"]
    assert [row["way"] for row in rows] == ["1 device, ordinary", "tensor parallel", "PPD"]
    assert rows[0]["identical"]
    assert rows[2]["identical"]
    assert all(len(row["tokens_per_second"]) == 3 for row in rows)


def test_startup(tmp_path):
    rows = figures(tmp_path, "benchmarks.startup --rounds 1 --layouts ordinary,threads-1")["rows"]
    for row in rows:
        phases = {name: values[0] for name, values in row["seconds"].items()}
        assert sum(phases.values()) == pytest.approx(2 * phases["whole"])
        assert ("workers" in phases) == (row["layout"] == "threads-1")


def test_the_report_names_commands_and_commit():
    text = report([("Hops", "hop --sizes 64 --pauses-ms 1 --count 5")])
    assert "## Hops" in text
    assert "python -m benchmarks.hop --sizes 64 --pauses-ms 1 --count 5" in text
    assert text.count("| unix | 64 |") == 1
    assert "Commit " in text


def test_siblings():
    options = "--model random:64x4 --dtype float32 --limit 2 --tokens 8 --prompt-tokens 20"
    found = siblings.measure(siblings.parser().parse_args(options.split()))
    assert (found["k"], found["workers"], found["texts"], found["tokens"]) == (3, 1, 2, 16)
    assert (found["identical_texts"], found["identical_tokens"], found["rate"]) == (2, 16, 1.0)
    assert "| random:64x4 | float32 | 3 | 1 |" in siblings.table(found)
