"""SIGTERM at each step of a command's start: it ends, with exit code 143, and nothing else is left to answer it.

A signal that the program has no handler for ends it, too, but not process 1 of a container: then Python's exit code is
minus the signal's number, and here that is a mistake.
"""

import shutil
import subprocess
import sys

import pytest
from grids import nightly

DEADLINE_S = 120
AS_PROCESS_ONE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Before a program's own words; the exit code is the program's."""
PPD = "from ppd_runtime.cli.entry import main; main()"
STRUCK = """
import os, signal, sys, time

def strike():
    os.kill(os.getpid(), signal.SIGTERM)

def leave():
    strike()

def swallow():
    try:
        strike()
    except SystemExit:
        strike()
    print("it goes on", flush=True)

def convert():
    try:
        strike()
    except SystemExit as error:
        raise RuntimeError("a library's") from error

def twice():
    try:
        strike()
    finally:
        time.sleep(0.05)
        strike()

def watch(frame, event, argument):
    if event == "call" and (frame.f_globals.get("__name__"), frame.f_code.co_name) == step:
        sys.setprofile(None)
        print("struck", flush=True)
        globals()[how]()

step, how = tuple(sys.argv.pop(1).split(":")), sys.argv.pop(1)
sys.setprofile(watch)
"""
"""Ends itself at the first call of a function, `module:function`; a module's own code is `module:<module>`."""
BEFORE_WORK = ("typer:<module>", "ppd_runtime.cli.main:<module>", "ppd_runtime.cli.serve:<module>")
BETWEEN = "typer._click.core:make_context"
"""The command is there, and its options are being read."""
AT_WORK = "ppd_runtime.methods.registry:<module>"
WITH_WORKERS = (
    "ppd_runtime.launch.socket_folder:__init__",
    "ppd_runtime.launch.fork_server:__init__",
    "ppd_runtime.launch.supervisor:start",
    "ppd_runtime.launch.processes:is_ready",
    "ppd_runtime.client.exchange:__init__",
    "ppd_runtime.server.run:__init__",
    "uvicorn.server:capture_signals",
    "ppd_runtime.server.run:startup",
    "ppd_runtime.server.run:_look_after_workers",
    "uvicorn.server:main_loop",
)


def end(step: str, how: str, *before: str, options: tuple[str, ...] = ("--stages", "2")) -> subprocess.CompletedProcess:
    """A server that is ended at a step."""
    words = [*before, sys.executable, "-c", STRUCK + PPD, step, how, "serve", "--port", "0", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("step", [*BEFORE_WORK, BETWEEN])
@pytest.mark.parametrize("how", ["leave", "swallow"])
def test_before_a_command_is_at_work_it_ends_at_once(step: str, how: str) -> None:
    ended = end(step, how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "struck\n", "")


@pytest.mark.parametrize("how", ["leave", "swallow", "convert", "twice"])
def test_at_work_it_ends_whatever_a_library_makes_of_it(how: str) -> None:
    ended = end(AT_WORK, how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "struck\n", "")


@nightly
@pytest.mark.parametrize("how", ["leave", "twice"])
@pytest.mark.parametrize("step", [*BEFORE_WORK, BETWEEN, AT_WORK, *WITH_WORKERS])
def test_process_one_ends_at_each_step(step: str, how: str) -> None:
    tried = shutil.which(AS_PROCESS_ONE[0]) and subprocess.run(
        [*AS_PROCESS_ONE, "true"], capture_output=True, text=True
    )
    if not tried or tried.returncode:
        pytest.skip(f"no namespaces of processes here: {tried.stderr.strip() if tried else 'unshare is not installed'}")
    ended = end(step, how, *AS_PROCESS_ONE)
    assert ended.returncode == 143, ended.stderr
    assert ended.stdout == "struck\n"
