"""Imports that look for no garbage leave the collector as they found it; what workers import leaves GPUs alone."""

import contextlib
import gc
import runpy
import subprocess
import sys

import psutil
import pytest
from waiting import wait_until

from ppd_runtime.imports import quick_imports
from ppd_runtime.launch.fork_server import can_fork, open_fork_server
from ppd_runtime.pipeline import wire

ASKED = """
import sys, torch
asked = []
for name in ("is_available", "device_count", "_lazy_init"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
import ppd_runtime.workers.process
sys.exit(", ".join(asked) or 0)
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()


def test_a_worker_starts_with_nothing_heavy_imported():
    slow = "{'torch', 'transformers', 'numpy', 'ray', 'zmq'} & set(sys.modules)"
    code = f"import sys, ppd_runtime.workers.entry; sys.exit(bool({slow}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_that_workers_import_asks_for_gpus():
    """CUDA would start where all of them are forked from, and fail in each."""
    run = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not can_fork(), reason="workers are not forked here")
def test_a_library_that_asks_for_gpus_does_not_start_cuda_where_workers_are_forked():
    """PyTorch asks NVML instead, where it is told to."""
    with contextlib.closing(open_fork_server()) as server:
        process = psutil.Process(server.process.pid)
        wait_until(process.environ)  # Linux shows an empty one for a moment after a program has begun
        assert process.environ()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_a_machine_without_msgspec_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    line = r"^ppd_runtime needs msgspec for its messages, which is not installed \(.*\): pip install msgspec$"
    with pytest.raises(ModuleNotFoundError, match=line):
        runpy.run_path(wire.__file__)
