"""Rings between worker processes: ordinary decoding's texts, also while either end is killed, and nothing is left."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from worker_processes import worker_processes

import ppd_runtime.launch.processes
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.transport.sockets import make_networks

PROMPT = [5, 9, 200, 31]
LONG = [*range(1, 1201)]
SAMPLED = {"temperature": 0.9, "seed": 3, "ignore_eos": True}
LAYOUTS = [{"stages": 2}, {"k": 1}]
MOST_RINGS = 8
"""A worker has two streams to and from each peer, the client among them."""
DEADLINE = 60.0


@pytest.fixture(params=LAYOUTS, ids=["stages", "k"], scope="module")
def runtime(request: pytest.FixtureRequest) -> Iterator[PPDRuntime]:
    """Two workers with rings for tensors of every size."""
    before = set(Path("/dev/shm").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppd_runtime.launch.processes, "make_networks", lambda _, *rest: make_networks("ring", *rest))
        with PPDRuntime(
            "demo", launcher="processes", speculation="always", dtype="float32", **request.param
        ) as runtime:
            yield runtime
    assert not worker_processes()
    assert not {name for name in set(Path("/dev/shm").iterdir()) - before if "ppd" in name.name}


@pytest.fixture(scope="module")
def ordinary() -> OrdinaryDecoding:
    """The oracle."""
    return OrdinaryDecoding("demo", dtype="float32")


def rings(process: psutil.Process) -> list[int]:
    """The bytes that are used of each ring that a process has mapped."""
    maps = Path(f"/proc/{process.pid}/smaps").read_text()
    return [1024 * int(kb) for kb in re.findall(r"memfd:ppd-ring.*?\nRss:\s+(\d+) kB", maps, re.DOTALL)]


def test_texts_are_ordinary_decodings(runtime: PPDRuntime, ordinary: OrdinaryDecoding) -> None:
    for prompt in (PROMPT, LONG):
        for settings in ({"max_new_tokens": 60}, {"max_new_tokens": 24} | SAMPLED):
            assert runtime.generate(prompt, **settings).token_ids == ordinary.generate(prompt, **settings).token_ids
    used = [max(rings(process)) for process in worker_processes().values()]
    assert min(used) > os.sysconf("SC_PAGE_SIZE"), "tensors went through a ring, from one worker to the other"


@pytest.mark.parametrize("victim", [0, 1])
def test_either_end_may_be_killed(runtime: PPDRuntime, ordinary: OrdinaryDecoding, victim: int) -> None:
    settings = {"max_new_tokens": 60} | SAMPLED
    expected = ordinary.generate(PROMPT, **settings).token_ids
    for _ in range(2):
        before = runtime.restarts
        name = sorted(worker_processes())[victim]
        text: list[int] = []
        for event in runtime.stream(PROMPT, **settings):
            text.append(event.token_id)
            if len(text) > 10 and name:
                worker_processes()[name].send_signal(signal.SIGKILL)
                name = ""
        assert text == [*expected]
        deadline = time.monotonic() + DEADLINE
        while runtime.restarts == before and time.monotonic() < deadline:  # workers are looked after during requests
            assert runtime.generate(PROMPT, **settings).token_ids == expected
        assert runtime.restarts == before + 1
        assert runtime.generate(PROMPT, **settings).token_ids == expected
    for process in worker_processes().values():
        assert 0 < len(rings(process)) <= MOST_RINGS, "those of lost peers are gone"
