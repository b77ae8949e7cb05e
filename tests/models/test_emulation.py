"""An emulated device changes how long a pass takes, and nothing else."""

import os
import time

import pytest
import torch
from models_for_tests import build_model

from benchmarks.emulated import woken_at_once
from ppd_runtime import PPDRuntime
from ppd_runtime.models.stage.emulation import EmulatedDevice, emulated
from ppd_runtime.models.stage.layer_range import LayerRange


@pytest.fixture(scope="module")
def model():
    return build_model("llama", num_layers=4)


def test_bits_are_the_plain_stages(model):
    plain, slow = LayerRange(model), emulated(LayerRange(model), EmulatedDevice(layer_ms=1.0, head_ms=1.0))
    for stage in (plain, slow):
        stage.begin(8)
    for inputs, position in (([5, 9, 200], 0), ([31], 3)):
        expected, got = plain.run(0, 4, inputs, position), slow.run(0, 4, inputs, position)
        assert torch.equal(expected, got)
        assert torch.equal(plain.logits(expected), slow.logits(got))
    assert slow.layer_passes == plain.layer_passes == 8


def test_passes_and_heads_take_their_time(model):
    stage = emulated(LayerRange(model), EmulatedDevice(layer_ms=20.0, head_ms=30.0))
    stage.begin(8)
    began = time.perf_counter()
    hidden = stage.run(0, 3, [5, 9, 200], 0)
    after_layers = time.perf_counter()
    stage.logits(hidden)
    assert after_layers - began >= 0.060
    assert time.perf_counter() - after_layers >= 0.030
    assert stage.layer_seconds >= 0.020, "who waits for this stage would not wait long enough"


@pytest.mark.parametrize(("name", "value"), [("layer_ms", -1.0), ("layer_ms", float("nan")), ("head_ms", float("inf"))])
def test_impossible_times_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        EmulatedDevice(**{"layer_ms": 1.0, name: value})


def test_workers_in_this_process_leave_its_threads_their_order(model_folder):
    folder = str(model_folder("llama", num_layers=4))
    before = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    with woken_at_once() as granted:
        if not granted:
            pytest.skip("no real-time scheduling for this user")
        with PPDRuntime(folder, k=1, transport="local", emulate=EmulatedDevice(1.0)) as runtime:
            runtime.generate([5, 9], max_new_tokens=6)
        assert (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) == (os.SCHED_RR, 1)
    assert (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) == before
