"""A worker whose processor gives other bits is refused, at the start and as a successor; it computes with other
instructions here than the others do.
"""

import contextlib
import time

import pytest
import torch
from grids import nightly
from worker_processes import worker_processes

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.launch.fork_server import open_fork_server
from ppd_runtime.launch.processes import ProcessWorkers
from ppd_runtime.launch.ray.workers import RayWorkers

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there are no other instructions"
)
PROMPT = [5, 9, 200, 31]
OTHER = {"ATEN_CPU_CAPABILITY": "default"}


@pytest.fixture(scope="module")
def with_others():
    """Starts workers that compute with other instructions: their fork server has chosen them in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OTHER.items():
            patch.setenv(name, value)
        server = open_fork_server()
    yield server.fork
    server.close()


@pytest.fixture
def others(monkeypatch, with_others):
    """Ranks whose workers have other instructions from their next start on; a list to add to."""
    ranks, plain, by_ray = [], ProcessWorkers._spawn, RayWorkers._spawn

    def spawn(self, rank):
        with pytest.MonkeyPatch.context() as patch:
            if rank in ranks:
                patch.setattr(self, "_start", with_others)
            return plain(self, rank)

    def spawn_by_ray(self, rank):
        self._environment = OTHER if rank in ranks else {}
        return by_ray(self, rank)

    monkeypatch.setattr(ProcessWorkers, "_spawn", spawn)
    monkeypatch.setattr(RayWorkers, "_spawn", spawn_by_ray)
    return ranks


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"k": 1, "launcher": "processes"}, ("the main process", "sub-process 1")),
        pytest.param({"stages": 2, "launcher": "processes"}, ("stage 2", "stage 1"), marks=nightly),
        pytest.param({"k": 1, "launcher": "ray"}, ("the main process", "sub-process 1"), marks=nightly),
    ],
    ids=str,
)
def test_a_start_with_other_bits_is_refused_in_a_line(folder, others, request, settings, names):
    if settings["launcher"] == "ray":
        request.getfixturevalue("ray_node")
    others.append(1)
    with pytest.raises(RuntimeError, match="failed to start: it computes other bits than") as refused:
        PPDRuntime(folder, dtype="float32", **settings).start()
    line = str(refused.value)
    assert "\n" not in line
    assert all(name in line for name in names)
    for capability in (torch.backends.cpu.get_cpu_capability(), "DEFAULT"):
        assert f" with {capability}, 1 threads, torch {torch.__version__}, transformers" in line
    assert not worker_processes()


def test_a_new_life_with_other_bits_is_refused_and_the_text_goes_on(folder, others, caplog):
    expected = OrdinaryDecoding(folder, dtype="float32").generate(PROMPT, max_new_tokens=40).token_ids
    given = {"k": 1, "dtype": "float32", "launcher": "processes", "max_restarts": 1}
    with PPDRuntime(folder, **given) as runtime:
        assert runtime.generate(PROMPT, max_new_tokens=40).token_ids == expected
        others.append(1)
        worker_processes()["sub-1"].kill()
        deadline = time.monotonic() + 120
        while not any("decoding goes on without it" in message for message in caplog.messages):
            assert time.monotonic() < deadline, "nobody was refused"
            assert runtime.generate(PROMPT, max_new_tokens=40).token_ids == expected
    words = "decoding goes on without it: sub-process 1 failed to start: it computes other bits than the main process"
    assert any(words in message for message in caplog.messages)


@pytest.mark.parametrize("name", ["stage-1", pytest.param("stage-2", marks=nightly)])
def test_a_new_stage_with_other_bits_ends_the_request(folder, others, caplog, name):
    given = {"stages": 2, "k": 1, "dtype": "float32", "launcher": "processes", "max_restarts": 1}
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(PPDRuntime(folder, **given))
        stream = runtime.stream(PROMPT, max_new_tokens=500, ignore_eos=True)
        next(stream)
        others.extend([0, 1])
        worker_processes()[name].kill()
        whom = "stage 2" if name == "stage-1" else "its first start"
        failed = rf"{name.replace('-', ' ')} failed, after 1 restarts: .* it computes other bits than {whom} \("
        with pytest.raises(RuntimeError, match=failed):
            list(stream)
    lost = [message for message in caplog.messages if "takes its place" in message]
    assert len(lost) == 1, "no token comes of a worker that is refused: it would forgive the losses"
    assert not worker_processes()
