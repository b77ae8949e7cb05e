"""Plain processes over Unix sockets need neither Ray nor ZeroMQ."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@nightly
def test_plain_processes_need_neither_ray_nor_zeromq(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Importing one of them fails, in workers too; ZeroMQ is named where it is asked for."""
    for name in ("ray", "zmq"):
        (tmp_path / f"{name}.py").write_text(LACKS)
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
