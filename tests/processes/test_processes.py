"""Workers as plain processes, without Ray: exact tokens, lost workers, start-up errors, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from grids import nightly
from worker_processes import worker_processes

import ppd_runtime.launch.processes
from benchmarks.emulated import woken_at_once
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.launch.processes import ProcessHandle
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.draft_model import DraftModelInfo
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.drafter import DrafterInfo
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.models.trained.heads import HeadInfo
from ppd_runtime.models.trained.mtp import MtpInfo
from ppd_runtime.models.trained.published import PublishedInfo
from ppd_runtime.pipeline.messages import Candidate
from ppd_runtime.settings.layouts import CLIENT, PaperLayout, StagedLayout
from ppd_runtime.transport.network import Network
from ppd_runtime.workers.process import read_spec, start_order
from ppd_runtime.workers.spec import WorkerSpec

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def expected(folder):
    """The oracle's text."""
    return OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=300).token_ids


@pytest.fixture
def rehearsed(expected):
    """A head that is always right."""
    return OracleHead(((*PROMPT, *expected),), 1.0, 300)


@pytest.fixture(scope="module")
def rehearsed_at_length(folder):
    """A long text and a head that is always right about it."""
    text = OrdinaryDecoding(folder).generate(PROMPT, max_new_tokens=500, ignore_eos=True).token_ids
    return text, OracleHead(((*PROMPT, *text),), 1.0, 300)


@pytest.mark.parametrize("head", ["shared", OracleHead(((1, 2, 3),), 0.5, 300), "trained"])
@pytest.mark.parametrize("emulate", [None, EmulatedDevice(3.0)])
@pytest.mark.parametrize("layout", [PaperLayout(5, 2, 2), StagedLayout((2, 3), 4, 3, 0.25, 200, False)])
@pytest.mark.parametrize("drafts", ["trained", "model"])
def test_a_specification_survives_its_journey(folder, head, emulate, layout, drafts):
    info = replace(describe(folder), eos_token_ids=frozenset({3, 1}))
    if head == "trained":
        head = HeadInfo(Path("/somewhere"), "m", "abc", 2, 32, 300, "def", "affine")
    code = {1: (Path("/kept/a.pt2"),) * 2, 3: (Path("/kept/b.pt2"),) * 2}
    spec = WorkerSpec(1, layout, info, torch.bfloat16, "cpu", 1, head, (0, 1), emulate, code)
    drafter = DrafterInfo(Path("/somewhere/else"), "m", "abc", 0, 32, 300, "def", (3, 5))
    if drafts == "model":
        drafter = DraftModelInfo(info, 300, torch.bfloat16, (3, 5), code)
    spec = replace(spec, guess_tokens=(3, 5), heavy_length=1500.0, way_seconds=(0.5, 0.0, 0.25), drafter=drafter)
    assert spec.pass_kinds == ({PassKind.ONE, 3} if isinstance(layout, PaperLayout) else {PassKind.ONE})
    head = PublishedInfo(Path("/a head"), "dflash", {"block_size": 8}, (1, 3), (3, 5), True, "def")
    for one in (drafter, head, MtpInfo(Path("/m"), 4, 300)):
        spec = replace(spec, drafter=one)
        assert read_spec(json.loads(start_order(spec, Network()))["spec"]) == spec


@pytest.mark.parametrize(("transport", "dtype"), [("unix", "float32"), ("zeromq", "bfloat16")])
def test_tokens_are_ordinary_decodings(folder, one_fork_server, transport, dtype):
    ordinary = OrdinaryDecoding(folder, dtype=dtype)
    with PPDRuntime(
        folder, k=2, launcher="processes", speculation="always", transport=transport, dtype=dtype
    ) as runtime:
        assert runtime._workers._servers == [one_fork_server], "each would take as long as importing PyTorch"
        for length in (1, 2, 40):
            expected = ordinary.generate(PROMPT, max_new_tokens=length).token_ids
            assert runtime.generate(PROMPT, max_new_tokens=length).token_ids == expected


def test_workers_share_their_weights():
    with PPDRuntime("demo", k=2, launcher="processes", speculation="always", dtype="float32") as runtime:
        runtime.generate(PROMPT, max_new_tokens=3)
        named = worker_processes().items()
        maps = {name: [m for m in w.memory_maps() if m.path.endswith(".safetensors")] for name, w in named}
    for name in ("sub-1", "sub-2"):
        (weights,) = maps[name]
        assert weights.path.startswith(str(cache_folder())), "in another dtype than the model's file"
        assert weights.rss > 10 * 2**20
        assert weights.shared_clean + weights.shared_dirty > 0.9 * weights.rss


def test_early_starts_are_used(folder, expected, rehearsed):
    """And where there is real-time scheduling, workers come before those of higher rank."""
    slow = EmulatedDevice(layer_ms=10.0)  # the least time in which a hit can come, however busy the machine
    layout = {"k": 2, "exit_head": rehearsed, "emulate": slow}
    with (
        woken_at_once() as granted,
        PPDRuntime(folder, launcher="processes", speculation="always", trace=True, **layout) as runtime,
    ):
        began = time.perf_counter_ns()
        result = runtime.generate(PROMPT, max_new_tokens=40)
        ended = time.perf_counter_ns()
        order = {name: os.sched_getparam(w.pid).sched_priority for name, w in worker_processes().items()}
    assert order["main"] > order["sub-1"] > order["sub-2"] > 1 or not granted
    assert result.token_ids == expected[:40]
    assert result.stats.hits > 0
    assert result.stats.latency_s > result.stats.main_layer_passes * 0.010
    assert result.stats.ledger.total_s == pytest.approx(result.stats.latency_s, rel=0.03)
    _assert_one_clock(result, began, ended)


def test_a_killed_sub_process_costs_no_token_and_comes_back(folder, rehearsed_at_length, caplog):
    expected, head = rehearsed_at_length
    slow = EmulatedDevice(layer_ms=2.0)
    with PPDRuntime(folder, k=2, launcher="processes", speculation="always", exit_head=head, emulate=slow) as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=len(expected))
        events = [next(stream) for _ in range(5)]
        first = worker_processes()
        _kill("sub-1", "sub-2")
        events += list(stream)
        assert tuple(event.token_id for event in events) == expected
        while worker_processes().get("sub-1", first["sub-1"]) == first["sub-1"]:
            assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == expected[:20]
        _kill("sub-1")  # as it comes back
        deadline = time.monotonic() + 120
        while True:
            again = runtime.generate(PROMPT, max_new_tokens=100)
            assert again.token_ids == expected[:100]
            if again.stats.hits:
                break
            assert time.monotonic() < deadline, "nobody came back"
    lost = [message for message in caplog.messages if "is lost" in message]
    new = "is lost, a new one takes its place:"
    died = "signal 9 ended it"
    assert sorted(lost[:2]) == [f"sub-process {n} {new} {died}" for n in (1, 2)]
    assert lost[2:] in ([f"sub-process 1 {new} {why}"] for why in (died, f"sub-process 1 failed to start: {died}"))


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.9, "seed": 3}, pytest.param({}, id="greedy", marks=nightly)], ids=["sampled", None]
)
def test_a_killed_main_process_has_a_successor(folder, rehearsed_at_length, settings):
    settings = {"max_new_tokens": 300, **settings}
    wanted = OrdinaryDecoding(folder).generate(PROMPT, **settings).token_ids
    with PPDRuntime(
        folder, k=1, launcher="processes", speculation="always", exit_head=rehearsed_at_length[1]
    ) as runtime:
        stream = runtime.stream(PROMPT, **settings)
        got = [next(stream) for _ in range(7)]
        _kill("main")
        got += list(stream)
        assert tuple(event.token_id for event in got) == wanted
        assert [event.position for event in got] == list(range(len(PROMPT), len(PROMPT) + len(got)))


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ({}, "sub-1"),
        pytest.param({}, "main", marks=nightly),
        pytest.param({"stages": 2}, "stage-1", marks=nightly),
        pytest.param({"stages": 2}, "stage-2", marks=nightly),
    ],
    ids=str,
)
def test_a_worker_that_is_stopped_is_replaced(folder, rehearsed_at_length, monkeypatch, caplog, layout, victim):
    monkeypatch.setattr(ppd_runtime.launch.processes, "ANSWER_DEADLINE_S", 3.0)
    expected, head = rehearsed_at_length
    with PPDRuntime(folder, k=1, launcher="processes", speculation="always", exit_head=head, **layout) as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=len(expected))
        got = [next(stream).token_id for _ in range(5)]
        _kill(victim, by=signal.SIGSTOP)
        got += [event.token_id for event in stream]
        assert tuple(got) == expected
        while not (lost := [message for message in caplog.messages if "is lost" in message]):
            runtime.generate(PROMPT, max_new_tokens=300)
        assert "has not answered for 3 s" in lost[0]
    assert not worker_processes()


@nightly
def test_whoever_has_slept_itself_has_lost_nobody(folder, monkeypatch):
    """The whole machine was asleep: the answer is late, and comes in a moment."""
    monkeypatch.setattr(ppd_runtime.launch.processes, "ANSWER_DEADLINE_S", 0.5)
    with PPDRuntime(folder, k=1, launcher="processes", speculation="always") as runtime:
        handle = runtime._workers.supervisor._posts[1].handle
        _kill("sub-1", by=signal.SIGSTOP)
        while handle._pinged_at is None:
            assert handle.end_reason() is None
            time.sleep(0.02)
        time.sleep(0.6)
        _kill("sub-1", by=signal.SIGCONT)
        assert handle.end_reason() is None
        _kill("sub-1", by=signal.SIGSTOP)
        time.sleep(0.2)
        while handle._answered_at and (reason := handle.end_reason()) is None:
            time.sleep(0.02)
        assert "has not answered" in reason


@nightly
def test_who_is_stopped_while_it_starts_has_failed(folder, monkeypatch):
    monkeypatch.setattr(ppd_runtime.launch.processes, "ANSWER_DEADLINE_S", 1.0)
    stopper = threading.Thread(target=lambda: _until_there("sub-1").send_signal(signal.SIGSTOP))
    stopper.start()
    with pytest.raises(RuntimeError, match="sub-process 1 failed to start: it has been stopped for 1 s"):
        PPDRuntime(folder, k=1, launcher="processes", speculation="always").start()
    stopper.join()
    assert not worker_processes()


def test_a_main_process_that_is_lost_again_and_again_is_an_error_with_its_name(folder):
    runtime = PPDRuntime(folder, k=1, launcher="processes", speculation="always", max_restarts=0)
    with runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=500)
        next(stream)
        _kill("main")
        with pytest.raises(RuntimeError, match="the main process failed: signal 9 ended it"):
            list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        runtime.generate(PROMPT, max_new_tokens=2)
    assert not worker_processes()


def test_a_worker_that_cannot_start_says_why(folder, tmp_path):
    for file in Path(folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(RuntimeError, match="failed to start: ValueError: .*cannot be read"):
        PPDRuntime(str(tmp_path), k=1, launcher="processes", speculation="always").start()
    assert not worker_processes()


def test_last_words_are_read_though_their_file_is_gone(tmp_path, one_fork_server):
    handle = ProcessHandle(PaperLayout(5, 2, 2), 1, "no order", tmp_path, one_fork_server.fork)
    try:
        (tmp_path / "errors-sub-1").unlink()
        handle.wait(60)
        assert handle.end_reason().startswith("json.decoder.JSONDecodeError")
    finally:
        handle.kill()


@pytest.mark.parametrize("looks_again", [True, False])
def test_what_a_worker_warns_of_is_logged_once_with_its_name(folder, caplog, looks_again):
    """Also what it warns of right before its end."""
    with PPDRuntime(folder, k=1, launcher="processes", speculation="always") as runtime:
        runtime.generate(PROMPT, max_new_tokens=2)
        assert not caplog.messages
        runtime._exchange.send(1, Candidate(CLIENT, 0, 9, [1000]))
        while looks_again and not caplog.messages:
            runtime.generate(PROMPT, max_new_tokens=2)
    fault = "token id 1000 is not among the model's 300"
    assert caplog.messages == [f"sub-process 1: left out what the client sent, a Candidate: {fault}"]


LIBRARY = """
import logging, sys, warnings
from ppd_runtime.workers import process

def open_worker(order):
    warnings.warn("it is hot\\nhere")
    for number in range(10_000):
        logging.getLogger("some.library").warning("%d %s", number // 2, "é" * 5000)
    print("warned", file=sys.stderr, flush=True)
    raise MemoryError("full")

process.open_worker = open_worker
process.serve_from_standard_input()
"""
"""A worker in which a library warns too much."""


def test_warnings_of_libraries_are_lines_and_never_waited_for():
    """Each text comes once. Nobody reads: what no longer fits the pipe is dropped."""
    command, pipes = [sys.executable, "-c", LIBRARY], dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as worker:
        worker.stdin.write(b"no order\n")
        worker.stdin.flush()
        assert worker.stderr.readline() == b"warned\n"
        *lines, last = worker.stdout.read().splitlines()
    assert json.loads(last) == {"error": "MemoryError: full"}
    assert lines[0] == b"!UserWarning: it is hot here"
    assert len(lines) > 2
    assert all(line.startswith(b"!%d " % number) and len(line) == 4095 for number, line in enumerate(lines[1:]))


def _assert_one_clock(result, began: int, ended: int) -> None:
    """Every process' spans lie within the call, and each early start arrives after it was sent."""
    processes = result.trace.processes
    assert len({process.pid for process in processes} - {os.getpid()}) == 3
    times = [time for process in processes for span in process.spans for time in (span.began_ns, span.ended_ns)]
    assert began < min(times) <= max(times) < ended
    early = [hop for hop in result.trace.hops() if hop.sent.message == "HeadStart"]
    assert len(early) >= result.stats.hits
    assert all(hop.sent.began_ns < hop.received.ended_ns for hop in early)


def _until_there(name: str) -> psutil.Process:
    while not (worker := worker_processes().get(name)):
        time.sleep(0.001)
    return worker


def _kill(*names: str, by: int = signal.SIGKILL) -> None:
    running = worker_processes()
    for name in names:
        running[name].send_signal(by)
