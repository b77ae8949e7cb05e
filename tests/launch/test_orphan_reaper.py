"""What still uses a folder of sockets is ended, and nothing else."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppd_runtime.launch import orphan_reaper
from ppd_runtime.launch.orphan_reaper import clear, users_of
from ppd_runtime.launch.socket_folder import SocketFolder

DEADLINE = 60  # that only a hang reaches
HOLD = """
import signal, sys, time
signal.signal(15, signal.SIG_IGN)
file = open(sys.argv[1])
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def holding(tmp_path):
    """Starts a process that has a file open, with a word in its command line."""
    started = []

    def hold(file, word):
        process = subprocess.Popen([sys.executable, "-c", HOLD, file, word], stdout=subprocess.PIPE)
        process.stdout.readline()
        started.append(process)
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_worker_is_ended_after_a_moment_of_grace(tmp_path, holding):
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "errors-1").touch()
    worker = holding(str(folder / "errors-1"), "ppd_runtime.workers.entry")
    assert users_of(str(folder)) == {worker.pid}
    began = time.monotonic()
    clear(str(folder), grace_s=0.5)
    assert 0.5 < time.monotonic() - began < DEADLINE
    assert worker.wait(DEADLINE) == -9
    assert not folder.exists()


def test_others_are_left_alone(tmp_path, holding):
    folder, beside = tmp_path / "sockets", tmp_path / "sockets-of-another"
    for place in (folder, beside):
        place.mkdir()
        (place / "log").touch()
    stranger = holding(str(folder / "log"), "a program of the user's")
    neighbour = holding(str(beside / "log"), "ppd_runtime.workers.entry")
    clear(str(folder), grace_s=0.2)
    assert not folder.exists()
    assert stranger.poll() is None
    assert neighbour.poll() is None
    assert beside.exists()


def test_a_folder_that_is_gone_is_no_trouble(tmp_path, holding):
    (tmp_path / "log").touch()
    worker = holding(str(tmp_path / "log"), "ppd_runtime.workers.entry")
    (tmp_path / "log").unlink()
    clear(str(tmp_path), grace_s=0.2)
    assert worker.wait(DEADLINE) == -9


def test_the_programs_end_is_enough_though_a_fork_of_it_holds_the_pipe(tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", orphan_reaper.__file__, folder, str(program.pid)], stdin=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.wait(0.5)
    assert folder.exists()
    program.communicate(b"\n")
    assert keeper.wait(DEADLINE) == 0
    assert not folder.exists()
    keeper.communicate()


def test_a_folder_is_removed_though_its_keeper_was_killed():
    folder = SocketFolder()
    folder._keeper.kill()
    folder._keeper.wait()
    folder.remove()
    folder.remove()
    assert not Path(folder.path).exists()
