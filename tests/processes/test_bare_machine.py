"""Plain processes over Unix sockets need neither Ray nor ZeroMQ, nor the newest transformers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from grids import nightly

from ppd_runtime import OrdinaryDecoding

ROOT = Path(__file__).parents[2]
PROMPT = [5, 9, 200, 31]
LACKS = "raise ModuleNotFoundError(f'No module named {__name__!r}: this machine lacks it', name=__name__)\n"
DECODE = """
import json, sys
from ppd_runtime import PPDRuntime

with PPDRuntime(sys.argv[1], launcher="processes", k=1) as runtime:
    print(json.dumps(runtime.generate(json.loads(sys.argv[2]), max_new_tokens=12, ignore_eos=True).token_ids))
try:
    PPDRuntime(sys.argv[1], k=1, launcher="processes", transport="zeromq").start()
except ValueError as error:
    print(json.dumps(str(error)))
"""
OLDER, _INSTALL_S, _RUN_S = "5.17", 600, 1800
"""Of transformers: what machines with GPUs have been seen with."""


@nightly
def test_plain_processes_need_neither_ray_nor_zeromq(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Importing one of them fails, in workers too; ZeroMQ is named where it is asked for."""
    _hide(tmp_path)
    folder = str(model_folder("llama"))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", DECODE, folder, json.dumps(PROMPT)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    text, complaint = map(json.loads, run.stdout.splitlines())
    ordinary = OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    assert text == list(ordinary)
    assert complaint.startswith("transport zeromq needs pyzmq, which is not installed (No module named 'zmq'")
    assert complaint.endswith("install it, or choose transport unix")


def _hide(folder: Path) -> None:
    for name in ("ray", "zmq"):
        (folder / f"{name}.py").write_text(LACKS)


@nightly
@pytest.mark.timeout(_INSTALL_S + 2 * _RUN_S)
def test_an_older_transformers_is_exact_and_runs_the_benchmark_for_gpus(tmp_path: Path) -> None:
    """Beside it the machine lacks Ray and ZeroMQ, but for the tests of exactness, which have what tests need."""
    older = ROOT / ".test_cache" / f"transformers-{OLDER}"
    if not older.exists():
        wanted = [f"transformers=={OLDER}.*", "huggingface-hub<2", "--target", str(tmp_path / "older")]
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *wanted], [], _INSTALL_S)
        older.parent.mkdir(exist_ok=True)
        (tmp_path / "older").rename(older)
    tests = [str(ROOT / "tests" / "unit" / f"test_{name}.py") for name in ("stage", "caches", "pipeline")]
    _run([sys.executable, "-m", "pytest", "-q", "-n", "0", "--timeout", "0", *tests], [older, ROOT], _RUN_S)
    _hide(tmp_path)
    pretend = ["-m", "benchmarks.gpu", "--pretend", "--out", str(tmp_path)]
    _run([sys.executable, *pretend], [tmp_path, older, ROOT], _RUN_S)
    found = [json.loads(line) for line in (tmp_path / "stages.jsonl").read_text().splitlines()]
    assert found[0]["rows"][0]["transformers"].startswith(OLDER)
    assert not any(row.get("error") for line in found for row in line["rows"])


def _run(command: list[str], paths: list[Path], timeout_s: float) -> None:
    environment = os.environ | ({"PYTHONPATH": os.pathsep.join(map(str, paths))} if paths else {})
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
