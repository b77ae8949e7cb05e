"""However and whenever a program ends, it leaves no process, no file and no shared memory."""

import contextlib
import os
import random

import psutil
import pytest
from grids import nightly
from programs import Program
from seeds import SEED

FAULTS = int(os.environ.get("PPD_FAULTS", "0"))
"""How often a program is ended at a random moment, if more often than by default."""


def workers(program):
    """Its main process and sub-processes."""
    found = []
    for child in program.family:
        with contextlib.suppress(psutil.Error):  # Ray has some that live for a moment
            if child.name().startswith("ppd-") or "ray::PPD" in "".join(child.cmdline()[:1]):
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        ("processes", "kill"),
        pytest.param("processes", "interrupt", marks=nightly),
        pytest.param("ray", "terminate", marks=nightly),
        pytest.param("processes", "exception", marks=nightly),
        pytest.param("processes", "terminate", marks=nightly),
        pytest.param("ray", "exception", marks=nightly),
        pytest.param("ray", "kill", marks=nightly),
        pytest.param("ray", "interrupt", marks=nightly),
    ],
)
def test_nothing_is_left_behind(folder, launcher, ending):
    with Program(folder, launcher, ending) as program:
        assert program.line() == f"running {launcher == 'ray'}", "Ray is imported where it is used, and only there"
        if ending != "exception":
            assert len(workers(program)) == 3
        if launcher == "processes":
            assert len(program.family) == 5, "three workers, who forks them, and who clears up"
        if (launcher, ending) == ("processes", "kill"):
            workers(program)[0].suspend()
        program.end()


@pytest.mark.parametrize(
    ("launcher", "ending", "times", "longest_s"),
    [
        ("processes", "interrupt", 1, 8.0),
        pytest.param("processes", "kill", 3, 8.0, marks=nightly),
        pytest.param("processes", "interrupt", 3, 8.0, marks=nightly),
        pytest.param("ray", "interrupt", 2, 14.0, marks=nightly),
        pytest.param("ray", "kill", 2, 14.0, marks=nightly),
    ],
)
def test_nothing_is_left_whenever_it_ends(folder, launcher, ending, times, longest_s):
    times = max(FAULTS, times)
    moments, most = random.Random(SEED), 0
    for _ in range(times):
        with Program(folder, launcher, ending) as program:
            program.run_for(moments.uniform(0.5, longest_s))
            program.interrupt()
            program.check_that_nothing_is_left()
            most = max(most, len(program.family))
    print(f"{ending} {times} times, {launcher}: up to {most} processes of its own, none left")


@nightly
@pytest.mark.parametrize("ending", ["kill", "interrupt"])
def test_nothing_is_left_of_stages(folder, ending):
    with Program(folder, "processes", ending, stages=3, rows=2) as program:
        assert program.line() == "running False"
        stages = workers(program)
        assert sorted(stage.name() for stage in stages) == ["ppd-stage-1", "ppd-stage-2", "ppd-stage-3"]
        stages[1].suspend()
        program.end()


@nightly
def test_a_second_ctrl_c_leaves_nothing_either(folder):
    moments = random.Random(SEED)
    with Program(folder, "ray", "interrupt") as program:
        program.line()
        program.interrupt()
        program.run_for(moments.uniform(0.0, 1.0))
        program.interrupt()
        program.check_that_nothing_is_left()
