"""PyTorch's CUDA build without a GPU: the options of NCCL that are set, padded passes, and exported ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grids import nightly

TESTS = Path(__file__).parents[1]
CUDA_BUILD = TESTS.parent / ".test_cache" / "cuda_build"
"""Kept from one night to the next: it is several gigabytes."""
_INSTALL_S, _RUN_S = 1800, 600


@nightly
@pytest.mark.timeout(_INSTALL_S + _RUN_S)
@pytest.mark.skipif(torch.version.cuda is not None, reason="the tests run with the CUDA build themselves")
def test_what_the_cuda_build_shows(tmp_path: Path) -> None:
    folder = CUDA_BUILD / torch.__version__.split("+")[0]
    if not folder.exists():
        _install(folder.name, tmp_path / "torch")
        folder.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch").rename(folder)
    paths = os.pathsep.join(map(str, (folder, TESTS.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}
    seen = _output([sys.executable, str(TESTS / "cuda_build.py")], _RUN_S, env=environment).splitlines()
    print(*seen, sep="\n")
    assert seen[0].startswith("nccl 2.")
    assert sum(line.startswith("stays there") for line in seen) == 4
    assert sum(line.startswith("exported") for line in seen) == 24


def _install(version: str, folder: Path) -> None:
    exact = f"torch==={version}"  # not the CPU build, whose version has an ending
    _output([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), exact], _INSTALL_S)


def _output(command: list[str], timeout_s: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
