"""What processes hold: the growth within short runs, and what is seen of a process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import endurance
from benchmarks.resource_usage import HELD, at_age, growth, held, own_temporary_folder, running


def lives(*values):
    """Processes that held so much after each of their requests."""
    return [[(float(value),) for value in life] for life in values]


def test_growth_is_of_each_life_by_itself():
    assert growth(lives([5, 7, 9], [100, 102], [50]), 0, 0) == 2
    assert growth(lives([1, 2, 3], [30, 30, 30]), 0, 0) == pytest.approx(0.5)
    assert growth(lives([5, 5, 5, 5], [90, 90]), 0, 0) == 0


def test_growth_counts_from_when_a_life_is_warm():
    assert growth(lives([1, 50, 90, 91, 92]), 0, 2) == 1
    assert growth(lives([1, 50, 90], [1]), 0, 2) is None


def test_who_did_not_live_so_long_is_left_out():
    some = lives([1, 2, 3], [5, 6], [9])
    assert [at_age(some, 0, age) for age in (1, 2, 3, 4)] == [5, 4, 3, None]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a /proc")
def test_what_this_process_holds_is_seen(tmp_path):
    this = psutil.Process()
    before = dict(zip(HELD, held(this), strict=True))
    read, write = os.pipe()
    with (tmp_path / "x").open("w"), socket.socket():
        after = dict(zip(HELD, held(this), strict=True))
    os.close(read)
    os.close(write)
    assert after["open files"] - before["open files"] == 4
    assert after["sockets"] - before["sockets"] == 1
    assert 0 < after["memory of its own, MB"] < after["memory, MB"]


def test_children_use_the_temporary_folder_and_are_seen_to_end():
    command = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp()); input()"]
    with own_temporary_folder() as folder:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline().startswith(f"{folder}/")
            process = psutil.Process(child.pid)
            assert running([process]) == [process]
        assert running([process]) == []
        assert len(list(folder.iterdir())) == 1
    assert not folder.exists()


def test_faults_that_never_come_are_not_waited_for():
    options = endurance.parser().parse_args(["--stop-share", "1.5"])
    with pytest.raises(ValueError, match="--stop-share 1.5: a share"):
        endurance.measure(options)
    options = endurance.parser().parse_args(["--faults", "3", "--fault-every-s", "0"])
    with pytest.raises(ValueError, match="--faults 3: none happen"):
        endurance.measure(options)
