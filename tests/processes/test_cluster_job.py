"""`ray job submit` on a real cluster with a dashboard and a token: the results, reruns, kills, logs and metrics."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from ppd_runtime import OrdinaryDecoding

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
NUM_CPUS = 6
SETTINGS = {"max_new_tokens": 24, "temperature": 1.0}


class Cluster:
    """A Ray cluster of one node, and commands with its token."""

    def __init__(self, folder: Path) -> None:
        self.gcs, self.dashboard, self.metrics = _free_ports(3)
        self.folder = Path(tempfile.mkdtemp(prefix="ppd-", dir="/tmp"))  # a socket's path has 107 bytes
        token = folder / "token"
        token.write_text(secrets.token_hex(16))
        own = {
            "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_metrics_report_interval_ms": "500",
            "HOME": str(folder),
        }
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
        options = {
            "port": self.gcs,
            "dashboard-port": self.dashboard,
            "metrics-export-port": self.metrics,
            "temp-dir": self.folder,
            "num-cpus": NUM_CPUS,
            "object-store-memory": 80 * 2**20,
        }
        command = [RAY, "start", "--head", "--block", "--include-dashboard=true"]
        self.log = folder / "ray.log"
        with self.log.open("w") as log:
            self._head = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in options.items())],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 60
        while self.run(RAY, "job", "list").returncode:
            assert time.monotonic() < deadline and self._head.poll() is None, self.log.read_text()

    def close(self) -> None:
        processes = psutil.Process(self._head.pid).children(recursive=True)
        self._head.terminate()
        psutil.wait_procs(processes, timeout=15)
        for process in processes:
            if process.is_running():
                process.kill()
        self._head.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], env=self.env, cwd=ROOT, text=True, capture_output=True, timeout=90)

    def submit(self, *arguments: object, wait: bool = True) -> subprocess.CompletedProcess[str]:
        waiting = [] if wait else ["--no-wait"]
        job = ["python", "-m", "cluster.job", "generate", *arguments]
        return self.run(RAY, "job", "submit", *waiting, "--working-dir", ".", "--", *job)

    def exported(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as answer:
            return answer.read().decode()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One cluster for all tests here."""
    pytest.importorskip("aiohttp", reason="the job server needs ray[default]")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.wait_until_up()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def folder(model_folder):
    """A small model."""
    return str(model_folder("llama", num_layers=4))


@pytest.fixture(scope="module")
def arguments(folder):
    """What every job here is given."""
    options = {"model": folder, "k": 2, "dtype": "float32", **SETTINGS}
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


def write_prompts(path: Path, number: int) -> list[str]:
    prompts = [f"The quick brown fox {i}" for i in range(number)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def check_results(out: Path, folder: str, prompts: list[str], **settings: object) -> None:
    """Every prompt once, with ordinary decoding's tokens."""
    rows = {row["index"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert len(rows) == len(out.read_text().splitlines()) == len(prompts)
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    for index, prompt in enumerate(prompts):
        expected = ordinary.generate(prompt, **SETTINGS | settings, seed=index)
        assert rows[index]["token_ids"] == list(expected.token_ids)
        assert rows[index]["text"] == expected.text
        assert rows[index]["finish_reason"] == expected.finish_reason


def test_a_job_writes_ordinary_decodings_tokens_and_a_rerun_skips_them(cluster, folder, arguments, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts = write_prompts(file, 3)
    job = cluster.submit(*arguments, "--prompt-file", file, "--out", out)
    assert job.returncode == 0, job.stdout + job.stderr
    check_results(out, folder, prompts)
    for line in ("placing 3 workers, each 1 CPU, STRICT_PACK on ", "3/3 prompts, ", "hit rate", "0 restarts"):
        assert line in job.stdout, job.stdout
    for name, layers in (("main process", 4), ("sub-process 1", 2), ("sub-process 2", 2)):
        assert re.search(rf"\({name} pid=\d+\).* {layers} of 4 layers in float32 on cpu", job.stdout), job.stdout
    before = out.read_bytes()
    rerun = cluster.submit(*arguments, "--prompt-file", file, "--out", out)
    assert rerun.returncode == 0
    assert f"3 of 3 prompts are done in {out}" in rerun.stdout
    assert out.read_bytes() == before


def test_a_killed_job_goes_on_where_it_was(cluster, folder, arguments, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts = write_prompts(file, 60)
    job = [*arguments, "--prompt-file", file, "--out", out, "--max-new-tokens", 60]
    assert cluster.submit(*job, wait=False).returncode == 0
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
    driver = only(
        process for process in psutil.process_iter(["cmdline"]) if str(out) in (process.info["cmdline"] or [])
    )
    driver.send_signal(signal.SIGKILL)
    done = out.read_bytes().count(b"\n")
    assert done < len(prompts)
    with out.open("ab") as file:
        file.write(b'{"index": 59, "id"')  # what a kill in the middle of a line leaves
    rerun = cluster.submit(*job)
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    assert f"{done} of 60 prompts are done" in rerun.stdout
    check_results(out, folder, prompts, max_new_tokens=60)


def test_the_dashboard_shows_what_a_node_exports(cluster, arguments, tmp_path):
    """With a sub-process killed on the way, so that its restart is counted."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    write_prompts(file, 400)
    job = [*arguments, "--prompt-file", file, "--out", out]
    assert cluster.submit(*job, wait=False).returncode == 0
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
    only(process for process in psutil.process_iter(["name"]) if process.info["name"] == "ray::PPDSub").kill()
    text = (ROOT / "cluster" / "grafana_dashboard.json").read_text()
    wanted = set(re.findall(r"\bray_ppd_\w+", text))
    assert wanted
    wait_for(lambda: wanted <= set(re.findall(r"^(ray_ppd_\w+)", cluster.exported(), re.MULTILINE)))
    workers = set(re.findall(r'^ray_ppd_layer_passes_total.*worker="([\w-]+)"', cluster.exported(), re.MULTILINE))
    assert workers == {"main", "sub-1", "sub-2"}


def test_a_cluster_that_is_too_small_is_named_at_once(cluster, arguments, tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_prompts(file, 1)
    job = [
        "-m",
        "cluster.job",
        "generate",
        *arguments,
        "--prompt-file",
        file,
        "--out",
        tmp_path / "out.jsonl",
        "--k",
        9,
    ]
    cluster.env["RAY_ADDRESS"] = f"127.0.0.1:{cluster.gcs}"
    began = time.monotonic()
    refused = cluster.run(sys.executable, *job)
    assert time.monotonic() - began < 20
    assert refused.returncode == 1
    assert "the runtime needs 10 bundles of 1 CPU on one node" in refused.stderr
    assert " with 6 CPUs, 0 GPUs (room for 6)" in refused.stderr


def wait_for(condition, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def only(found):
    """One of them at least."""
    return next(iter(found))
