"""The memory of a stage's process: its own layers', and the heads that boundaries guess with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers

_PEAKS = """
import json, os, re, sys
from ppd_runtime.imports import quick_imports
with quick_imports():
    import torch
    from ppd_runtime.models.checkpoint.description import describe
    from ppd_runtime.models.checkpoint.loading import load_layers

def told(name):
    return int(re.search(rf"{name}:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def load(info, first, last):
    model = load_layers(info, last, torch.float32, "cpu", first)
    return sum(float(p.sum()) for p in model.parameters())  # a mapped file takes memory when it is read

def peak(info, *layers):  # of a process of its own, which begins at this one's memory
    to_read, to_write = os.pipe()
    if not os.fork():
        before = told("VmRSS")
        load(info, *layers)
        os.write(to_write, str(told("VmHWM") - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(to_read, 100))

torch.set_num_threads(1)
model, small = map(describe, sys.argv[1:3])  # what the checks of a model take is not counted
load(small, 0, 1)  # nor what the first load imports
least = peak(small, 0, 1)  # what any process takes that loads a model
print(json.dumps([peak(model, *layers) - least for layers in json.loads(sys.argv[3])]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process' peak memory there")
def test_all_stages_together_take_the_memory_of_one_model_and_the_boundaries_heads(model_folder):
    """12 layers of 2.4 MB, an embedding of 10 MB and a head of as many: the peak of each stage's process."""
    folder = model_folder("llama", num_layers=12, hidden_size=256, vocab_size=10_000, tied=False)
    ranges = [[0, 12], [0, 4], [4, 8], [8, 12]]
    command = [sys.executable, "-c", _PEAKS, str(folder), str(model_folder("llama")), json.dumps(ranges)]
    whole, *stages = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=600).stdout)
    weights = load_layers(describe(str(folder)), 12, torch.float32, "cpu").state_dict()
    head = weights["lm_head.weight"].nbytes
    assert whole > 0.95 * sum(tensor.nbytes for tensor in weights.values()), "the measurement sees a whole model"
    assert sum(stages) == pytest.approx(whole + 2 * head, rel=0.1)
    assert max(stages) < 0.7 * whole, "each without the others' layers"
