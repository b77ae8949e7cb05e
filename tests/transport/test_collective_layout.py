"""Where `transport="collective"` is chosen, refused, and which GPU an actor takes as its own."""

import pytest
import torch

from ppd_runtime import PPDRuntime
from ppd_runtime.launch.ray.gpus import own_device
from ppd_runtime.transport import collective_groups as groups
from ppd_runtime.transport.sockets import choose_transport


@pytest.mark.parametrize(
    ("transport", "on_gpus", "own_gpus", "chosen"),
    [
        ("auto", False, False, "auto"),
        ("auto", False, True, "auto"),
        ("auto", True, False, "auto"),
        ("auto", True, True, "auto"),
        ("collective", False, False, "collective"),
        ("collective", True, True, "collective"),
        ("zeromq", True, True, "zeromq"),
        ("unix", True, True, "unix"),
    ],
)
def test_collectives_are_chosen_only_where_they_are_asked_for(transport, on_gpus, own_gpus, chosen):
    assert choose_transport(transport, on_gpus, own_gpus) == chosen


def test_a_shared_gpu_is_refused_unless_nccl_is_told_to_try(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(ValueError, match=r"^transport='collective' with workers that share a GPU.*: choose .*$"):
        choose_transport("collective", on_gpus=True, own_gpus=False)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_transport("collective", on_gpus=True, own_gpus=False) == "collective"


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_pytorch_without_nccl_is_refused():
    with pytest.raises(ValueError, match=r"^transport='collective' with device='cuda:0': .*without nccl; choose .*$"):
        groups.check_backend("cuda:0")
    groups.check_backend("cpu")


def test_a_pytorch_without_gloo_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(groups.dist, "is_backend_available", lambda _: False)
    with pytest.raises(ValueError, match=r"^transport='collective' with device='cpu': .*without gloo; choose .*$"):
        PPDRuntime(k=1, device="cpu", transport="collective", launcher="processes")


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "device"),
    [
        ([], None, ""),
        ([5], None, "cuda:5"),
        ([2], "2", "cuda:0"),
        (["6"], "4,5,6,7", "cuda:2"),
        (["GPU-b"], "GPU-a, GPU-b", "cuda:1"),
        (["3"], "0,1,2,3,4,5,6,7", "cuda:3"),
    ],
)
def test_an_actor_knows_its_own_gpu(gpu_ids, visible, device):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert own_device(gpu_ids, environment) == device


def test_a_gpu_that_an_actor_cannot_see_is_an_error():
    with pytest.raises(RuntimeError, match="GPU 3, but it sees '0,1'"):
        own_device([3], {"CUDA_VISIBLE_DEVICES": "0,1"})
