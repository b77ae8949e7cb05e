"""The benchmark for the first hour with a GPU loses nothing where a stage fails, and every stage can be tried."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hop
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import passes
from benchmarks.gpu.processes import run_stage
from benchmarks.gpu.scene import Scene
from benchmarks.models import random_config

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, stages: str) -> int:
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--out", str(out), "--pretend", "--stages", stages])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    return int(ended.value.code or 0)


@pytest.mark.nightly
def test_a_stage_that_fails_and_one_that_takes_too_long_stop_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hops` is not in the module that is asked; `bits` gets no time."""
    monkeypatch.setitem(runner.STAGES, "bits", ("bits", 0.0))
    monkeypatch.setitem(runner.STAGES, "hops", ("passes", 60.0))
    assert run(monkeypatch, tmp_path, "hops,bits,versions") == 1
    lines = [json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["hops", "bits", "versions"]
    assert lines[0]["error"].startswith("exit code 1: AttributeError: module")
    assert lines[1]["error"].startswith("it took longer than 0 s")
    assert lines[2]["error"] is None
    assert [row["bandwidth of"] for row in lines[2]["rows"][1:]] == ["a copy", "a product of one row"]
    text = (tmp_path / "report.md").read_text()
    assert "PRETENDED" in text
    assert "Failed: hops, bits. Not equal where they should be: none." in text
    assert text.count("| a copy |") == 1


def test_what_a_stage_found_before_its_end_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text(
        "import os, sys\ndef stage(scene):\n print('a library says hello')\n yield {'ms': 1.5}\n"
        " print('{\"ms\": 2', flush=True)\n print('why', file=sys.stderr, flush=True)\n os._exit(3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = run_stage("stage", "dying", pretend=True, deadline_s=60)
    assert line["rows"] == [{"ms": 1.5}]
    assert line["error"] == "exit code 3: why"
    wrong = line | {"rows": [{"equal": False, "note": "a|b", "ms": None}], "pretend": False}
    assert "Not equal where they should be: stage." in runner.report([wrong])
    assert r"| NO | a\|b | - |" in runner.report([wrong])
    assert "PRETENDED" not in runner.report([wrong])


def test_rows_that_round_otherwise_together_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run one by one then: a report that named them would name this stage on every GPU."""
    for keep in (True, False):
        monkeypatch.setattr(passes, "_rows_alone", lambda stage, rows, same=keep: same)
        rows = list(passes.bits(Scene(pretend=True)))
        line = {"stage": "bits", "seconds": 1.0, "error": None, "pretend": True, "rows": rows}
        text = runner.report([line])
        assert "Not equal where they should be: none." in text
        assert ("| NO |" in text) != keep


def test_its_models_have_grouped_heads_of_128_numbers() -> None:
    for shape in ("little", "small", "llama3-8b"):
        config = random_config(shape)
        assert config.head_dim == 128
        assert config.num_attention_heads > config.num_key_value_heads


def test_what_has_come_by_zeromq_is_no_figure_of_nccls() -> None:
    """Until a link is up, and where it does not open, its tensors go with their messages."""
    nccl = hop.Series("collective", 8192, 1, count=200, device="cuda:0")
    hop.check_link(nccl, 200)
    with pytest.raises(RuntimeError, match=r"^NCCL has brought 3 of 200 tensors, the others came by ZeroMQ$"):
        hop.check_link(nccl, 3)
    for transport, device in (("unix", "cuda:0"), ("collective", "cpu")):
        hop.check_link(replace(nccl, transport=transport, device=device), 0)


def test_an_unknown_stage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "hops,nonsense") == 2
    assert "argument --stages: nonsense: choose from versions, " in capsys.readouterr().err


def on_a_bare_machine(tmp_path: Path, *options: str) -> dict[str, dict]:
    """What each stage has to say on a machine that has neither Ray nor pyzmq: whoever imports them fails."""
    for name in ("ray", "zmq"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('this machine lacks it', name={name!r})\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--pretend", "--out", str(tmp_path), *options]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = {line["stage"]: line for line in map(json.loads, (tmp_path / "stages.jsonl").read_text().splitlines())}
    assert all(line["rows"] and not [row for row in line["rows"] if row.get("error")] for line in lines.values())
    return lines


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_every_stage_can_be_tried_on_a_bare_machine_without_a_gpu(tmp_path: Path) -> None:
    lines = on_a_bare_machine(tmp_path)
    assert list(lines) == list(runner.STAGES)
    rows = [(name, row) for name, line in lines.items() for row in line["rows"]]
    assert not [(name, row) for name, row in rows if row.get("equal") is False]
    assert all(row["% of a copy's"] > 0 for name, row in rows if name == "llama")
