"""The wheel works outside the repository: the demo model is in it, and the command runs from it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_holds_the_demo_model_and_runs_elsewhere(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    built = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    elsewhere = tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(elsewhere)
    demo = elsewhere / "ppd_runtime" / "models" / "demo"
    parts = ("adapter/adapter.json", "adapter/adapter.safetensors", "probe/probe.json", "probe/probe.safetensors")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "card.json", *parts):
        assert (demo / name).read_bytes() == (ROOT / "ppd_runtime" / "models" / "demo" / name).read_bytes()
    for name in ("py.typed", "tune/prompts/demo.jsonl", "models/native/layers.cpp", "models/native/vectors.h"):
        assert (elsewhere / "ppd_runtime" / name).exists(), name
    adapted = ROOT / "ppd_runtime" / "models" / "adapted"
    for path in filter(Path.is_file, adapted.rglob("*")):
        assert (elsewhere / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert wheel.stat().st_size < 40 * 2**20

    code = (
        "import ppd_runtime, sys; sys.stderr.write(ppd_runtime.__file__); from ppd_runtime.cli.main import app; app()"
    )
    arguments = ["generate", "import os\n", "--transport", "local", "--k", "1", "--max-new-tokens", "8", "--json"]
    environment = os.environ | {"PYTHONPATH": str(elsewhere)}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert str(elsewhere) in run.stderr
    assert json.loads(run.stdout)["stats"]["new_tokens"] == 8
