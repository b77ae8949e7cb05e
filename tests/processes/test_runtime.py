"""How a runtime behaves: calls in turn, cancelled streams, lost workers, errors, and nothing left behind."""

import contextlib
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from grids import nightly
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

import ppd_runtime.launch.ray.workers
from ppd_runtime import PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import weight_bytes

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module", params=["threads", "ray", "processes"])
def runtime(request, folder):
    """A runtime on threads, one on Ray's actors, and one on plain processes: each test leaves it usable."""
    if request.param == "ray":
        yield request.getfixturevalue("over_ray")
        return
    layout = {"transport": "local"} if request.param == "threads" else {"launcher": "processes"}
    with PPDRuntime(folder, k=2, **layout) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def over_ray(ray_node, folder):
    with PPDRuntime(folder, k=2, launcher="ray", transport="zeromq", speculation="always") as runtime:
        yield runtime


def test_many_calls_and_a_stream(runtime, ordinary):
    for length in (1, 2, 17):
        expected = ordinary.generate(PROMPT, max_new_tokens=length)
        assert runtime.generate(PROMPT, max_new_tokens=length).token_ids == expected.token_ids
    events = list(stream := runtime.stream(PROMPT, max_new_tokens=9))
    result = stream.result
    assert [event.token_id for event in events] == list(result.token_ids)
    assert [event.position for event in events] == list(range(len(PROMPT), len(PROMPT) + 9))
    assert "".join(event.text for event in events) == result.text
    assert [event.hit for event in events][-1] is None
    assert sum(bool(event.hit) for event in events) == result.stats.hits
    assert result.stats.time_to_first_token_s <= result.stats.latency_s


def test_a_cancelled_stream_leaves_the_runtime_usable(runtime, ordinary):
    stream = runtime.stream(PROMPT, max_new_tokens=400)
    first = [next(stream).token_id for _ in range(3)]
    stream.close()
    expected = ordinary.generate(PROMPT, max_new_tokens=20).token_ids
    assert tuple(first) == expected[:3]
    assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == expected


def test_a_second_call_waits_or_is_told(runtime, ordinary):
    stream = runtime.stream(PROMPT, max_new_tokens=40)
    next(stream)
    with pytest.raises(RuntimeError, match="exhaust or close"):
        runtime.generate(PROMPT, max_new_tokens=2)
    got = []
    other = threading.Thread(target=lambda: got.append(runtime.generate(PROMPT[:2], max_new_tokens=8)))
    other.start()
    rest = [event.token_id for event in stream]
    other.join(60)
    assert len(rest) == 39
    assert got[0].token_ids == ordinary.generate(PROMPT[:2], max_new_tokens=8).token_ids


def test_failed_calls_leave_the_runtime_usable(runtime, ordinary):
    for bad in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 1.5}, {"max_new_tokens": 5000}):
        with pytest.raises(ValueError, match="max_new_tokens|temperature|top_p"):
            runtime.generate(PROMPT, **bad)
    for prompt in ("", [], [300], [-1], ["a", 5], [1.5], [True], None, 5, b"abc", "\ud800abc"):
        with pytest.raises(ValueError, match="prompt|token id"):
            runtime.generate(prompt, max_new_tokens=2)
    assert runtime.generate(PROMPT, max_new_tokens=3).token_ids == ordinary.generate(PROMPT, max_new_tokens=3).token_ids


def test_a_closed_runtime_says_so(folder):
    runtime = PPDRuntime(folder, k=1, transport="local")
    runtime.generate(PROMPT, max_new_tokens=2)
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeError, match="closed"):
        runtime.generate(PROMPT, max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 301}, "k=301.*300"),
        ({"exit_layer": 1}, "exit_layer=1: .*2 to 3"),
        ({"exit_layer": 4}, "exit_layer=4: .*2 to 3"),
        ({"workers": 4, "k": 3}, "workers=4 with k=3: .*give 3 or fewer"),
        ({"transport": "pigeon"}, "transport='pigeon'"),
        ({"launcher": "mpi"}, "launcher='mpi': choose one of auto, ray, processes"),
        ({"launcher": "processes", "transport": "local"}, "launcher='processes' with transport='local'.*drop one"),
        ({"launcher": "processes", "ray_address": "h:1"}, "ray_address='h:1' with launcher='processes'.*drop one"),
        ({"transport": "local", "ray_address": "h:1"}, "ray_address='h:1' with transport='local'.*drop one"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "cpu:fast"}, "device='cpu:fast'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"exit_head": "/nowhere"}, "exit_head='/nowhere'"),
        ({"threads_per_worker": 0}, "threads_per_worker=0"),
        ({"threads_per_worker": 100_000}, "threads_per_worker=100000: .*CPU cores"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(folder, settings, words):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(ValueError, match=words):
        PPDRuntime(folder, **settings)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_another_ray_than_the_programs(ray_node, folder):
    for address in ("127.0.0.1:9", "local"):
        with pytest.raises(
            ValueError, match=f"ray_address='{address}': this program is connected to Ray at .* already"
        ):
            PPDRuntime(folder, ray_address=address)
    here = ray.get_runtime_context().gcs_address
    for address in (here, "auto"):
        assert PPDRuntime(folder, ray_address=address).launcher == "ray"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs are there")
def test_actors_that_share_a_gpu_and_do_not_fit_there_are_refused(ray_node, folder, monkeypatch):
    """Before any is there; each fits alone. Ray gives them GPUs in earnest, and what is free there is made up."""
    free = weight_bytes(describe(folder), 0, 4, torch.float32)

    @ray.remote
    def find_gpu():
        return str(ray.get_gpu_ids()[0]), "10.0.0.3", free

    monkeypatch.setattr(ppd_runtime.launch.ray.workers, "find_gpu", find_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = _actors()  # of the module's own runtime
    runtime = PPDRuntime(folder, k=1, device="cuda", dtype="float32", launcher="ray", gpus_per_worker=0.5)
    line = rf"^device='cuda:[01]' of 10.0.0.3: 2 workers need .* and {free / 1e9:.2f} GB are free: choose .*$"
    with pytest.raises(ValueError, match=line):
        runtime.start()
    assert _actors() <= before


def test_killed_actors_are_replaced(over_ray, ordinary, caplog):
    expected = ordinary.generate(PROMPT, max_new_tokens=300).token_ids
    stream = over_ray.stream(PROMPT, max_new_tokens=300)
    got = [next(stream).token_id for _ in range(5)]
    for victim in ("PPDSub", "PPDMain"):
        _kill(victim, most=2)
    got += [event.token_id for event in stream]
    assert tuple(got) == expected
    supervisor, deadline = over_ray._workers.supervisor, time.monotonic() + 120
    while not all(map(supervisor.is_serving, (1, 2))):
        assert time.monotonic() < deadline, "no sub-process came back"
        assert over_ray.generate(PROMPT, max_new_tokens=30).token_ids == expected[:30]
    lost = [message for message in caplog.messages if "is lost" in message]
    assert sorted(lost) == [
        f"{name} is lost, a new one takes its place: its process was killed or crashed"
        for name in ("sub-process 1", "sub-process 2", "the main process")
    ]


@nightly
def test_a_stopped_actor_is_replaced(ray_node, folder, ordinary, monkeypatch, caplog):
    monkeypatch.setattr(ppd_runtime.launch.ray.workers, "ANSWER_DEADLINE_S", 3.0)
    expected = ordinary.generate(PROMPT, max_new_tokens=300).token_ids
    with PPDRuntime(folder, k=1, launcher="ray") as runtime:
        stream = runtime.stream(PROMPT, max_new_tokens=300)
        got = [next(stream).token_id for _ in range(5)]
        stopped = _kill("PPDMain", most=1, by=signal.SIGSTOP)
        got += [event.token_id for event in stream]
        assert tuple(got) == expected
    assert ["has not answered for 3 s" in message for message in caplog.messages if "is lost" in message] == [True]
    _, alive = psutil.wait_procs(stopped, timeout=10)
    assert not alive


@nightly
def test_an_actor_that_is_stopped_while_it_starts_has_failed(ray_node, folder, monkeypatch):
    monkeypatch.setattr(ppd_runtime.launch.ray.workers, "_LOADING_DEADLINE_S", 5.0)
    stopped = []
    stopper = threading.Thread(target=lambda: stopped.append(_stop_as_it_starts("ray::PPDSub.answer")))
    stopper.start()
    with pytest.raises(RuntimeError, match="sub-process 1 failed to start: it has not answered for 5 s"):
        PPDRuntime(folder, k=1, launcher="ray").start()
    stopper.join()
    _, alive = psutil.wait_procs(stopped, timeout=10)
    assert not alive


@nightly
def test_a_worker_that_cannot_start_says_why(ray_node, folder, tmp_path):
    broken = tmp_path / "model"
    broken.mkdir()
    for file in Path(folder).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(RuntimeError, match="failed to start.*cannot be read"):
        PPDRuntime(str(broken), k=1, launcher="ray").start()


@pytest.mark.parametrize("never", [True, False])
def test_what_ray_took_back_before_it_ran_is_told_apart(never):
    error = ActorDiedError(ActorDiedErrorContext(actor_id=bytes(16), error_message="node lost", never_started=never))
    assert ppd_runtime.launch.ray.workers._never_ran(error) == never


def _stop_as_it_starts(title: str) -> psutil.Process:
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if title in "".join(process.cmdline()):
                    time.sleep(1)  # it has answered once, and PyTorch takes longer
                    process.suspend()
                    return process


def _actors() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True) if _actor_name(process)}


def _actor_name(process: psutil.Process) -> str:
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return next((name for name in ("PPDMain", "PPDSub") if f"ray::{name}" in title), "")


def _kill(name: str, most: int, by: int = signal.SIGKILL) -> list[psutil.Process]:
    """The youngest: those of the runtime that was made last."""
    found = [p for p in psutil.Process().children(recursive=True) if _actor_name(p) == name]
    victims = sorted(found, key=psutil.Process.create_time)[-most:]
    assert victims, f"no {name} is running"
    for victim in victims:
        victim.send_signal(by)
    if by == signal.SIGKILL:
        psutil.wait_procs(victims, timeout=10)
    return victims
