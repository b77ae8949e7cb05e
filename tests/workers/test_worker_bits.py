"""What workers compare before they serve tells models apart, too: no two stages hold the same layers."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from two_gpus import two_gpus

from ppd_runtime import PPDRuntime
from ppd_runtime.launch.threads import LocalWorkers
from ppd_runtime.models.build import load_stage
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.workers import worker
from ppd_runtime.workers.bits import NO_BITS
from ppd_runtime.workers.spec import WorkerSpec
from ppd_runtime.workers.worker import Worker


def bits_of_stages(folder):
    """Of the workers of two stages, in this process."""
    runtime = PPDRuntime(str(folder), stages=2, transport="local", dtype="float32")
    return [Worker(spec).bits() for spec in runtime._specs]


def test_another_model_in_the_same_place_is_noticed(model_folder):
    """As on two hosts whose folders of the same path hold different weights."""
    last, first = bits_of_stages(model_folder("llama", num_layers=4))
    assert first.different(last) == []
    _, other = bits_of_stages(model_folder("llama", num_layers=4, seed=1))
    assert "the model's files" in other.different(last)


@pytest.fixture
def second_gpu_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Two GPUs whose layers run on this CPU; the second one rounds otherwise if the list has True."""
    rounds = [False]

    def load(info: object, last: int, dtype: torch.dtype, device: str, *others: object) -> LayerRange:
        stage = load_stage(info, last, dtype, "cpu", *others)
        if device == "cuda:1" and rounds[0]:
            stage.model.lm_head.weight.data *= 1 + 2**-20
        return stage

    monkeypatch.setattr(worker, "load_stage", load)
    with two_gpus():
        yield rounds


def is_left(thread: threading.Thread) -> bool:
    """Whether it is a worker's that does not end, and so keeps its layers."""
    is_worker = thread.name.startswith("ppd-")
    if is_worker:
        thread.join(10)
    return is_worker and thread.is_alive()


@pytest.mark.parametrize("unlike", [False, True])
def test_threads_on_unlike_gpus_are_refused(
    model_folder: Callable[..., Path], second_gpu_rounds: list[bool], unlike: bool
) -> None:
    """As processes are: two GPUs of one host need not be of one kind."""
    second_gpu_rounds[0] = unlike
    runtime = PPDRuntime(model_folder("llama"), stages=2, transport="local", dtype="float32", guess_vocab=300)
    specs = [replace(spec, device=f"cuda:{spec.rank}") for spec in runtime._specs]
    before = threading.enumerate()
    if unlike:
        with pytest.raises(RuntimeError, match=r"^stage 1 failed to start: it computes other bits than stage 2 \(the"):
            LocalWorkers(specs, 0, print)
        assert not any(is_left(thread) for thread in threading.enumerate() if thread not in before)
        return
    workers = LocalWorkers(specs, 0, print)
    assert all("the head over 1" in post.handle.bits.hashes for post in workers.supervisor._posts.values())
    workers.close()


def test_threads_on_one_device_compare_nothing(folder: str) -> None:
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32") as runtime:
        posts = runtime._workers.supervisor._posts
        assert [post.handle.bits for post in posts.values()] == [NO_BITS] * 2


def test_layers_are_loaded_in_a_thread_of_their_own(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and OpenMP's helpers with it: with more threads than cores those of each product sleep in between."""
    loaded_in = []

    def load(spec: WorkerSpec) -> Worker:
        loaded_in.append(threading.current_thread())
        return Worker(spec)

    monkeypatch.setattr("ppd_runtime.launch.threads.Worker", load)
    with PPDRuntime(folder, stages=2, transport="local", dtype="float32"):
        assert [thread.is_alive() for thread in loaded_in] == [False, False]
