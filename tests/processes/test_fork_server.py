"""Who forks the workers may itself be killed, be stopped, or fail to start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from grids import nightly
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime

PROMPT = [5, 9, 200, 31]
SETTINGS = {"max_new_tokens": 200, "ignore_eos": True}
BEGIN = """
import json, logging, sys
import old_containers, psutil
from waiting import wait_until
from worker_processes import worker_processes
logging.basicConfig(format="%(message)s")
{before}
from ppd_runtime import PPDRuntime

def tell(found):
    print(json.dumps(found), flush=True)

def kill(processes):
    for process in processes:
        process.kill()
    wait_until(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes))

def tokens():
    return runtime.generate({prompt}, **{settings}).token_ids
"""
WITHOUT_DESCRIPTORS = """
with PPDRuntime({folder!r}, k=1, launcher="processes") as runtime:
    tell(tokens())
    tell(sorted(worker_processes()))
    tell([child.cmdline()[-1:] for child in psutil.Process().children()].count(["fork-server"]))
    kill([worker_processes()["main"]])
    tell(tokens())
tell(sorted(worker_processes()))
"""
WITH_ORPHANS = """
def zombies():
    return [child.name() for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]

with PPDRuntime({folder!r}, k=1, launcher="processes") as runtime:
    for _ in range(2):
        tokens()
        workers = list(worker_processes().values())
        kill([child for child in psutil.Process().children() if child.cmdline()[-1:] == ["fork-server"]])
        kill(workers)
        tell(tokens())
        tell(zombies())
    (server,) = [child for child in psutil.Process().children() if child.cmdline()[-1:] == ["fork-server"]]
    server.suspend()
tell(zombies())
"""


@pytest.fixture(scope="module")
def expected(folder):
    """The oracle's text."""
    return OrdinaryDecoding(folder).generate(PROMPT, **SETTINGS).token_ids


@pytest.fixture(autouse=True)
def _no_other_tests_server(monkeypatch):
    """Runtimes share a fork server while the environment stays, and these tests look after theirs."""
    monkeypatch.setenv("PPD_TEST", "fork server")


def forking() -> list[psutil.Process]:
    """The fork servers of the test that runs."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in running if child.cmdline()[-1:] == ["fork-server"]]
    return [server for server in servers if server.environ().get("PPD_TEST")]


def test_runtimes_of_one_program_share_it(folder, expected):
    """While it is stopped, it holds up new lives alone, and nobody waits for what it has to say."""
    first, second = (PPDRuntime(folder, k=1, launcher="processes") for _ in range(2))
    with first:
        (server,) = forking()
        with second:
            assert forking() == [server]
            first.close()
            server.send_signal(signal.SIGSTOP)
            worker_processes()["sub-1"].kill()
            assert second.generate(PROMPT, **SETTINGS).token_ids == expected
    assert not forking()


@nightly
def test_a_killed_server_takes_nobody_with_it_and_has_a_successor(folder, expected, caplog):
    with PPDRuntime(folder, k=1, launcher="processes") as runtime:
        stream = runtime.stream(PROMPT, **SETTINGS)
        got = [next(stream).token_id for _ in range(5)]
        (server,) = forking()
        workers = worker_processes()
        server.kill()
        server.wait(10)
        assert tuple(got + [event.token_id for event in stream]) == expected
        workers["main"].kill()
        assert runtime.generate(PROMPT, **SETTINGS).token_ids == expected
        assert caplog.messages == ["the main process is lost, a new one takes its place: it ended"]
        assert forking() != [server]
        worker_processes()["main"].kill()
        assert runtime.generate(PROMPT, **SETTINGS).token_ids == expected
        assert "signal 9 ended it" in caplog.messages[-1]
    _, alive = psutil.wait_procs([server, *workers.values()], timeout=10)
    assert not alive
    assert not forking()


def test_a_server_that_cannot_start_says_why(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="failed to start: it ended with exit code 1"):
        PPDRuntime(folder, k=1, launcher="processes").start()


def with_these_modules():
    """The environment in which programs find the tests' modules."""
    paths = filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run(source, before, folder):
    """The JSON lines that a program prints that runs to its end, and what it says beside."""
    source = (BEGIN + source).format(before=before, prompt=PROMPT, settings=SETTINGS, folder=folder)
    command = [sys.executable, "-c", source]
    shown = subprocess.run(command, env=with_these_modules(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    return list(map(json.loads, shown.stdout.splitlines())), shown.stderr


def test_processes_without_descriptors_are_not_forked():
    look = "import old_containers; old_containers.refuse_process_descriptors()\n"
    look += "from ppd_runtime.launch.fork_server import can_fork; print(can_fork())"
    assert (
        subprocess.run([sys.executable, "-c", look], env=with_these_modules(), capture_output=True).stdout == b"False\n"
    )


@nightly
def test_without_descriptors_of_processes_workers_are_started_alone(folder, expected):
    """As in gVisor and under old container runtimes; who is lost has a successor, and nobody stays."""
    lines, said = run(WITHOUT_DESCRIPTORS, "old_containers.refuse_process_descriptors()", folder)
    assert lines == [list(expected), ["main", "sub-1"], 0, list(expected), []]
    assert said == "the main process is lost, a new one takes its place: signal 9 ended it\n"


@nightly
def test_whoever_gets_orphans_collects_workers_whose_server_is_gone(folder, expected):
    """As process 1 of a container: before, each stayed as a zombie."""
    lines, said = run(WITH_ORPHANS, "old_containers.get_orphans()", folder)
    assert lines == [list(expected), []] * 2 + [[]]
    assert set(said.splitlines()) == {
        f"{who} is lost, a new one takes its place: signal 9 ended it" for who in ("the main process", "sub-process 1")
    }
