"""Workers on two hosts, over TCP with CURVE: exact tokens, over a bad link, too, when the sub-process is killed on its
host, or each of two stages, and when the link between the hosts goes away.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from grids import nightly
from hosts import Hosts, why_not

from ppd_runtime import OrdinaryDecoding

pytestmark = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6399
PROMPT = [5, 9, 200, 31]
NUM_LAYERS, LAYER_MS, NUM_TOKENS, MATCH_RATE = 4, 10.0, 60, 0.8
LINK_GONE_S = 3.0
LINKED_WITHIN_S = 90.0
"""Workers rest before they try again to link."""
WITH_A_LINK = 4
"""TCP connections between two workers: ZeroMQ has two and Ray may have one; a link has two more, one a direction."""


@contextlib.contextmanager
def ray_cluster(hosts):
    """A Ray node on each host; the environment of those who take part."""
    with tempfile.TemporaryDirectory(prefix="ppd-", dir="/tmp") as temporary:
        token = Path(temporary, "token")
        token.write_text(secrets.token_hex(16))
        environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        }
        nodes = []
        head = f"{hosts.addresses[0]}:{PORT}"
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            own = Path(temporary, name)
            own.mkdir()
            role = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not nodes else [f"--address={head}"]
            command = [RAY, "start", *role, f"--node-ip-address={address}", "--num-cpus=2", "--block"]
            command += [f"--temp-dir={own}", f"--object-store-memory={80 * 2**20}"]
            with (own / "log").open("w") as log:
                nodes.append(subprocess.Popen(hosts.command(name, *command), env=environment, stdout=log, stderr=log))
            if len(nodes) == 1:
                _wait_for_port(hosts, nodes[0], own / "log")
        try:
            yield environment, head
        finally:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    node.wait(15)
                node.kill()


def _wait_for_port(hosts, node, log):
    probe = f"import socket; socket.create_connection(({hosts.addresses[0]!r}, {PORT}), timeout=1)"
    deadline = time.monotonic() + 60
    while subprocess.run(hosts.command(hosts.names[0], sys.executable, "-c", probe), capture_output=True).returncode:
        assert node.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.3)


@contextlib.contextmanager
def driver(hosts, environment, given):
    """The runtime on the first host, as a function from settings to results."""
    command = hosts.command(hosts.names[0], sys.executable, str(ROOT / "tests/driver_on_a_host.py"), json.dumps(given))
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def ask(settings=None):
        if settings is not None:
            process.stdin.write(json.dumps(settings) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        assert line, process.stderr.read()[-3000:]
        return json.loads(line)

    try:
        assert ask()["ready"]
        yield ask
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()


def worker(hosts, title, *names):
    """A worker by its process' title, and its host; all are on different ones, those of these names where there are."""
    for name in names or hosts.names:
        for pid in hosts.run(name, "ip", "netns", "pids", name).stdout.split():
            with contextlib.suppress(psutil.Error):
                if (process := psutil.Process(int(pid))).cmdline()[0].startswith(f"ray::{title}"):
                    print(f"the {title} runs on {name}")
                    return process, name
    raise AssertionError(f"no {title} runs on any host")


def connections_between_workers(hosts):
    """TCP connections that the main process has with the sub-process."""
    ends = []
    for title in ("PPDMain", "PPDSub"):
        process, name = worker(hosts, title)
        lines = hosts.run(name, "ss", "-Htnp", "state", "established").stdout.splitlines()
        ends.append({tuple(line.split()[2:4]) for line in lines if f"pid={process.pid}," in line})
    return len(ends[0] & {(there, here) for here, there in ends[1]})


def is_linked_or_not(hosts, transport):
    """A collective's workers have a link, by and by; those of other transports have none."""
    deadline = time.monotonic() + LINKED_WITHIN_S
    while transport == "collective" and connections_between_workers(hosts) < WITH_A_LINK:
        assert time.monotonic() < deadline, "the workers are not linked"
        time.sleep(0.5)
    assert (connections_between_workers(hosts) >= WITH_A_LINK) == (transport == "collective")


def takes_part(ask, text):
    """Ask for texts until there are hits; the last result."""
    deadline = time.monotonic() + 60
    while True:
        run = ask({"max_new_tokens": NUM_TOKENS})
        assert tuple(run["tokens"]) == text
        if any(run["hits"]):
            return run
        assert time.monotonic() < deadline, "the sub-process takes no part"


def a_killed_worker_costs_only_time(hosts, ask, text):
    """The sub-process is killed in the middle of a text, and has a successor."""
    killed_in_a_text(hosts, ask, text, "PPDSub")
    deadline = time.monotonic() + 60
    while takes_part(ask, text)["restarts"] < 1:
        assert time.monotonic() < deadline, "nobody has noticed"


def killed_in_a_text(hosts, ask, text, *where):
    """A worker is killed in the middle of a text; what the text's end tells."""
    ask({"max_new_tokens": NUM_TOKENS, "tell_at": 10})
    worker(hosts, *where)[0].kill()
    run = ask()
    assert tuple(run["tokens"]) == text
    return run


def without_link_in_a_text(hosts, ask, text):
    """The link is gone for a while in the middle of a text."""
    ask({"max_new_tokens": NUM_TOKENS, "tell_at": 10})
    hosts.set_link(0.0, loss=1.0)
    time.sleep(LINK_GONE_S)
    hosts.set_link(0.0)
    assert tuple(ask()["tokens"]) == text


def over_bad_links(hosts, ask, ordinary):
    """Sampled texts over links that lose frames, and that are slow."""
    for seed, (delay_ms, loss) in enumerate([(1, 0.03), (20, 0.0)]):
        hosts.set_link(delay_ms / 1000, loss)
        sampled = {"max_new_tokens": 20, "temperature": 0.8, "seed": seed}
        expected = ordinary.generate(PROMPT, ignore_eos=True, **sampled).token_ids
        assert tuple(ask(sampled)["tokens"]) == expected
    hosts.set_link(0.0)


@pytest.fixture(scope="module")
def two_hosts():
    """Two hosts with a Ray node each, what to know of them, and the head's address."""
    with Hosts(2) as hosts, ray_cluster(hosts) as (environment, head):
        yield hosts, environment, head


@pytest.fixture(scope="module")
def ordinary(model_folder):
    """The oracle."""
    return OrdinaryDecoding(str(model_folder("llama", num_layers=NUM_LAYERS)), dtype="float32")


@contextlib.contextmanager
def runtime_on(two_hosts, ordinary, transport, **layout):
    """The hosts, what the runtime was given, its function from settings to results, and the text that it is to give."""
    hosts, environment, head = two_hosts
    text = ordinary.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).token_ids
    given = {"folder": str(ordinary.info.folder), "prompt": PROMPT, "text": text, "vocab_size": 300, "layout": layout}
    given |= {"match_rate": MATCH_RATE, "layer_ms": LAYER_MS, "transport": transport}
    given |= {"ray_address": head, "bind_interface": hosts.addresses[0]}
    hosts.set_link(0.0)
    with driver(hosts, environment, given) as ask:
        yield hosts, given, ask, text


@nightly
@pytest.mark.parametrize(("transport", "run_ahead"), [("zeromq", False), ("zeromq", True), ("collective", False)])
def test_tokens_on_two_hosts(two_hosts, ordinary, transport, run_ahead):
    with runtime_on(two_hosts, ordinary, transport, k=1, run_ahead=run_ahead) as (hosts, _, ask, text):
        takes_part(ask, text)
        is_linked_or_not(hosts, transport)
        over_bad_links(hosts, ask, ordinary)
        a_killed_worker_costs_only_time(hosts, ask, text)
        is_linked_or_not(hosts, transport)
        without_link_in_a_text(hosts, ask, text)
        takes_part(ask, text)
        is_linked_or_not(hosts, transport)


@nightly
@pytest.mark.parametrize("transport", ["collective", "zeromq"])
def test_stages_on_two_hosts(two_hosts, ordinary, transport):
    with runtime_on(two_hosts, ordinary, transport, stages=2, k=2, rows=2) as (hosts, _, ask, text):
        assert tuple(ask({"max_new_tokens": NUM_TOKENS})["tokens"]) == text
        over_bad_links(hosts, ask, ordinary)
        for number, name in enumerate(hosts.names, 1):
            assert killed_in_a_text(hosts, ask, text, "PPDStage", name)["restarts"] >= number
        without_link_in_a_text(hosts, ask, text)
