"""Probes: a server that is well, one that is not, and none."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from servers import running

from cluster.health import is_well
from ppd_runtime import OrdinaryDecoding

ROOT = Path(__file__).parents[2]


class Ailing(OrdinaryDecoding):
    """Ordinary decoding that lacks a worker, so it says."""

    def unwell(self) -> list[str]:
        return ["stage 1"]


def test_a_server_that_listens_has_to_be_well(model_folder) -> None:
    folder = model_folder("llama", num_layers=2)
    with running(OrdinaryDecoding(folder)) as server:
        assert is_well(server.url)
        assert is_well(server.url, "/ready")
        server.server.service.admission.draining = True
        assert is_well(server.url)
        assert not is_well(server.url, "/ready")
    with running(Ailing(folder)) as server:
        assert not is_well(server.url)
        environment = {**os.environ, "PPD_SERVER_URL": server.url}
        probe = [sys.executable, "-m", "cluster.health"]
        assert subprocess.run(probe, env=environment, cwd=ROOT).returncode == 1
    assert subprocess.run(probe, env=environment, cwd=ROOT).returncode == 0  # nothing listens any more


def test_a_server_that_does_not_answer_is_not_well(monkeypatch) -> None:
    monkeypatch.setattr("cluster.health._ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not is_well(f"http://127.0.0.1:{silent.getsockname()[1]}")
