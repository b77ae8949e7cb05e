"""`ray job submit` on a real cluster with a dashboard and a token: the results, reruns, kills, logs and metrics."""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from grids import nightly

from cluster.health import is_well
from ppd_runtime import OrdinaryDecoding

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
NUM_CPUS = 6
JOB = ("-m", "cluster.job", "generate")
SETTINGS = {"max_new_tokens": 60, "temperature": 1.0}


class Cluster:
    """A Ray cluster of one node, and commands with its token."""

    def __init__(self, folder: Path) -> None:
        self.gcs, self.dashboard, self.metrics, client, agent = _free_ports(5)
        self.folder = Path(tempfile.mkdtemp(prefix="ppd-", dir="/tmp"))  # a socket's path has 107 bytes
        self.token, token = secrets.token_hex(16), folder / "token"
        token.write_text(self.token)
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
            "ray-client-server-port": client,
            "dashboard-agent-listen-port": agent,
            "temp-dir": self.folder,
            "num-cpus": NUM_CPUS,
            "object-store-memory": 80 * 2**20,
        }
        command = [RAY, "start", "--head", "--include-dashboard=true"]
        self.started = self.run(*command, *(f"--{name}={value}" for name, value in options.items()))

    def answers(self) -> bool:
        """Whether the job server does, to those with the token."""
        assert self.started.returncode == 0, self.started.stdout + self.started.stderr
        url, headers = f"http://127.0.0.1:{self.dashboard}/api/version", {"Authorization": f"Bearer {self.token}"}
        with contextlib.suppress(OSError), urllib.request.urlopen(urllib.request.Request(url, headers=headers)):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url)
            return True
        return False

    def processes(self) -> set[psutil.Process]:
        """Every process that has the folder in its command line, and those that it has started: no other Ray's."""
        every = psutil.process_iter(["cmdline"])
        servers = [process for process in every if str(self.folder) in " ".join(process.info["cmdline"] or [])]
        return {child for server in servers for child in (server, *server.children(recursive=True))}

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        address = {} if command[0] == RAY else {"RAY_ADDRESS": f"127.0.0.1:{self.gcs}"}
        return subprocess.run(
            [*map(str, command)], env=self.env | address, cwd=ROOT, text=True, capture_output=True, timeout=300
        )

    def submit(self, *arguments: object, wait: bool = True) -> subprocess.CompletedProcess[str]:
        waiting = [] if wait else ["--no-wait"]
        return self.run(RAY, "job", "submit", *waiting, "--working-dir", ".", "--", "python", *JOB, *arguments)

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
        wait_for(cluster.answers)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def arguments(folder):
    """What every job here is given."""
    options = {"model": folder, "k": 1, "dtype": "float32", **SETTINGS}
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


def write_prompts(path: Path, number: int) -> list[str]:
    prompts = [f"The quick brown fox {i}" for i in range(number)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def check_results(out: Path, folder: str, prompts: list[str], compared: set[int]) -> None:
    """Every prompt once, those compared with ordinary decoding's tokens."""
    rows = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda row: row["index"])
    assert [row["index"] for row in rows] == list(range(len(prompts)))
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    assert [row["prompt"] for row in rows] == list(prompts)
    for index in compared:
        expected = ordinary.generate(prompts[index], **SETTINGS, seed=index)
        assert rows[index]["token_ids"] == list(expected.token_ids)
        assert rows[index]["text"] == expected.text
        assert rows[index]["finish_reason"] == expected.finish_reason


@nightly
def test_a_killed_job_goes_on_where_it_was(cluster, folder, arguments, tmp_path):
    """Nothing is lost or done twice; meanwhile a lost sub-process comes back and the node exports what it was."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts = write_prompts(file, 2000)  # more than it will get to
    job = [*arguments, "--prompt-file", file, "--out", out]
    submitted = cluster.submit(*job, wait=False)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    wait_for(lambda: lines(out) >= 2)
    kill(cluster, "ray::PPDSub")
    check_metrics(cluster)
    kill(cluster, str(out))  # the driver
    done = lines(out)
    assert done < len(prompts)
    with out.open("ab") as results:
        results.write(b'{"index": 1999, "id"')  # what a kill in the middle of a line leaves

    wanted = done + 4
    rerun = cluster.submit(*job, "--limit", wanted)
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    check_results(out, folder, prompts[:wanted], {0, 1, 2, *range(done - 2, wanted)})
    for words in (f"{done} of {wanted} prompts are done in {out}", "placing 2 workers, each 1 CPU, STRICT_PACK on "):
        assert words in rerun.stdout, rerun.stdout
    last = rf"^{wanted}/{wanted} prompts, [\d.]+ tokens/s, hit rate 0\.\d\d, 0 restarts$"
    assert re.search(last, rerun.stdout, re.MULTILINE), rerun.stdout
    for name, layers in (("main process", 4), ("sub-process 1", 2)):
        words = rf"\({name} pid=\d+\).* serves with {layers} of 4 layers in float32 on cpu"
        assert re.search(words, rerun.stdout), rerun.stdout

    before = out.read_bytes()
    again = cluster.run(sys.executable, *JOB, *job, "--limit", wanted)
    assert f"{wanted} of {wanted} prompts are done in {out}" in again.stdout
    assert out.read_bytes() == before


@nightly
def test_a_server_as_a_job(cluster, folder):
    """It answers over stages of the cluster, replaces a lost one, and ends when its job is stopped."""
    (port,) = _free_ports(1)
    place = [RAY, "job", "submit", "--no-wait", "--submission-id", "serving", "--working-dir", ".", "--", "python"]
    options = ["--model", folder, "--stages", 2, "--dtype", "float32", "--port", port]
    submitted = cluster.run(*place, "-m", "cluster.job", "serve", *options)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: _listens(url))
    expected = OrdinaryDecoding(folder, dtype="float32").generate("The quick", max_new_tokens=9)
    assert _completed(url) == expected.text
    kill(cluster, "ray::PPDStage")
    wait_for(lambda: not is_well(url))
    assert _completed(url) == expected.text
    wait_for(lambda: is_well(url))
    stopped = cluster.run(RAY, "job", "stop", "serving")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_for(lambda: not _listens(url))
    wait_for(lambda: not [process for process in cluster.processes() if process.name().startswith("ray::PPD")])


def _listens(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=10):
        return True
    return False


def _completed(url: str) -> str:
    body = json.dumps({"prompt": "The quick", "max_tokens": 9, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def check_metrics(cluster: Cluster) -> None:
    """Every metric of the dashboard is exported, by worker; the killed sub-process' restart is among them."""
    wanted = set(re.findall(r"\bray_ppd_\w+", (ROOT / "cluster" / "grafana_dashboard.json").read_text()))
    assert "ray_ppd_restarts_total" in wanted
    wait_for(lambda: wanted <= set(re.findall(r"^ray_ppd_\w+", cluster.exported(), re.MULTILINE)))
    by_worker = re.findall(r'^ray_ppd_layer_passes_total.*worker="([\w-]+)"', cluster.exported(), re.MULTILINE)
    assert set(by_worker) == {"main", "sub-1"}


@nightly
def test_a_job_without_the_token_is_told_so(cluster, arguments, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("The quick brown fox\n")
    monkeypatch.delitem(cluster.env, "RAY_AUTH_MODE")
    refused = cluster.run(sys.executable, *JOB, *arguments, "--prompt-file", file, "--out", tmp_path / "out.jsonl")
    assert refused.returncode == 1
    assert f"ppd: no Ray cluster takes this program in at 127.0.0.1:{cluster.gcs}" in refused.stderr
    assert "asks for a token (RAY_AUTH_MODE='' here), set RAY_AUTH_MODE=token" in refused.stderr


@nightly
def test_every_command_joins_the_cluster_that_the_environment_names(cluster, folder, monkeypatch):
    generate = [sys.executable, "-m", "ppd_runtime.cli.entry", "generate", "x", "--model", folder]
    refused = cluster.run(*generate, "--k", "9")
    assert refused.returncode == 1
    assert "ppd: the runtime needs 10 bundles of 1 CPU on one node" in refused.stderr
    wrong = cluster.folder / "wrong"
    wrong.write_text(secrets.token_hex(16))
    monkeypatch.setitem(cluster.env, "RAY_AUTH_TOKEN_PATH", str(wrong))
    refused = cluster.run(*generate, "--k", "1", "--ray-address", f"127.0.0.1:{cluster.gcs}")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"ppd: no Ray cluster takes this program in at 127.0.0.1:{cluster.gcs}: ")
    assert refused.stderr.count("\n") == 1


def lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def kill(cluster: Cluster, word: str) -> None:
    """End, with SIGKILL, one process of the cluster whose command line begins with a word, or has it among others."""
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if words and (words[0].startswith(word) or word in words):
                process.kill()
                return
    raise AssertionError(f"no process with {word}")
