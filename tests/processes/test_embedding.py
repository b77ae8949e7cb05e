"""A runtime as a guest in its user's program: threads that end, a second runtime, the program's own Ray, signals."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from grids import nightly

from ppd_runtime import OrdinaryDecoding
from ppd_runtime.host import available_cores

PROMPT = [5, 9, 200, 31]
BEGIN = """
import json, logging, os, signal, sys, threading, time
from ppd_runtime.imports import quick_imports
logging.basicConfig(format="%(message)s")
with quick_imports():
    from ppd_runtime import PPDRuntime

PROMPT = [5, 9, 200, 31]

def runtime(**settings):
    return PPDRuntime({folder!r}, dtype="float32", **settings)

def tokens(runtime):
    return list(runtime.generate(PROMPT, max_new_tokens=12).token_ids)

def in_a_thread(function, *arguments):
    got = []
    thread = threading.Thread(target=lambda: got.append(function(*arguments)))
    thread.start()
    thread.join()
    return got[0]
"""
SERVER = """
import http.server, urllib.request
shared = runtime(k=1, launcher="ray")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(tokens(shared)).encode())

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)  # a thread for each request
threading.Thread(target=server.serve_forever, daemon=True).start()

def ask():
    return json.load(urllib.request.urlopen("http://127.0.0.1:%d" % server.server_port))

print(ask(), flush=True)
time.sleep(8)  # longer than Ray waits for a node that is gone
print(ask(), in_a_thread(tokens, shared), flush=True)
shared.close()
"""
TWO = """
first = runtime(k=1, launcher={launcher!r})
print(in_a_thread(tokens, first), first.launcher)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
second = runtime(k=1, launcher={launcher!r})
second.start()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print(heard, tokens(first), tokens(second))
first.close()
print(tokens(second), os.sched_getaffinity(0) != set())
"""
TWO_ON_RAY = """
import ray
ray.init(ignore_reinit_error=True)
ray.shutdown()
try:
    tokens(second)
except RuntimeError as error:
    print(error)
print(ray.is_initialized())
"""
INTERRUPTED_IMPORT = """
import sys
for attempt in range(2):
    print("importing", flush=True)
    try:
        from ppd_runtime import PPDRuntime
        break
    except KeyboardInterrupt:
        print("interrupted", flush=True)
with PPDRuntime({folder!r}, k=1, transport="local") as runtime:
    print(runtime.generate([5, 9, 200, 31], max_new_tokens=12).token_ids, flush=True)
"""
COMMAND = [sys.executable, "-m", "ppd_runtime.cli.entry", "generate", "import os", "--k", "1"]


@pytest.fixture(scope="module")
def expected(folder):
    """The oracle's text."""
    return list(OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=12).token_ids)


def run(tmp_path: Path, source: str, **names: str) -> tuple[list[str], str]:
    """Run a program to its end, which is a good one: the lines that it prints, and what it says beside."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(source).format(**names))
    shown = subprocess.run([sys.executable, file], env=environment(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines(), shown.stderr


def environment(**more: str) -> dict[str, str]:
    """Without any Ray to join; a program does not wait for one that is gone as long as it usually does."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return plain | {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"} | more


@nightly
def test_the_thread_of_the_first_call_may_end(folder, expected, tmp_path):
    """On Ray; `test_two_runtimes_in_one_program` shows it of processes."""
    lines, _ = run(tmp_path, BEGIN + SERVER, folder=folder)
    assert lines == [f"{expected}", f"{expected} {expected}"]


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=nightly)])
def test_two_runtimes_in_one_program(folder, expected, tmp_path, launcher):
    source = BEGIN + TWO + (TWO_ON_RAY if launcher == "ray" else "")
    lines, said = run(tmp_path, source, folder=folder, launcher=launcher)
    assert lines[:3] == [f"{expected} {launcher}", f"['SIGTERM'] {expected} {expected}", f"{expected} True"]
    if available_cores() < 4:
        assert f"2 workers, beside 2 of other runtimes, share {available_cores()} CPU cores" in said
    if launcher == "ray":
        assert "this program has shut down the Ray that the runtime's workers were on" in lines[3]
        assert lines[4] == "False", "Ray is not started again behind the program's back"


@nightly
@pytest.mark.parametrize("launcher", ["processes", "ray"])
def test_sigterm_ends_a_command_and_its_workers(launcher):
    command = [*COMMAND, "--launcher", launcher, "--max-new-tokens", "2000", "--ignore-eos"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.stdout.read(40).startswith(b"import os")
            family = psutil.Process(running.pid).children(recursive=True)
            running.terminate()
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 143
    assert b"SIGTERM" not in errors
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


@nightly
def test_ctrl_c_while_a_library_is_imported(folder, expected, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(INTERRUPTED_IMPORT.format(folder=folder))
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True, preexec_fn=hears_it) as running:
        assert running.stdout.readline() == "importing\n"
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        rest, _ = running.communicate(timeout=120)
    assert rest == f"interrupted\nimporting\n{tuple(expected)}\n"


def hears_it() -> None:
    """Python ignores Ctrl-C where its parent does, as a shell's background job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_before_a_command_is_there():
    code = """
        import sys
        class Interrupted:
            def find_spec(name, *_):
                if name == {name!r}:
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted)
        from ppd_runtime.cli.entry import main
        main()
    """
    for name in ("typer", "ppd_runtime.cli.generate"):
        words = [sys.executable, "-c", textwrap.dedent(code).format(name=name), "generate", "a fox"]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "\nppd: stopped\n")
