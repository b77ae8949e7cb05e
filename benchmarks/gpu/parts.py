"""What the device is, its ceilings, and what messages cost."""

import importlib.util
import os

import torch
import transformers
from torch.nn.functional import linear

from benchmarks import hop
from benchmarks.gpu.scene import Rows, Scene
from benchmarks.models import random_config
from ppd_runtime.models.compiled.toolkit import check_toolkit

_OPTIONAL = ("ray", "zmq", "triton", "msgspec", "safetensors")


def versions(scene: Scene) -> Rows:
    """What is there, and the ceilings: copies and products of one row."""
    lacking = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "lacks": ", ".join(lacking)}
    if scene.device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(scene.device)
        nccl = torch.cuda.nccl.version() if hasattr(torch.cuda, "nccl") else None
        about |= {"gpu": of_gpu.name, "GB": of_gpu.total_memory / 1e9, "cuda": torch.version.cuda, "nccl": str(nccl)}
    try:
        check_toolkit()
        about["compiling"] = "can be done"
    except ValueError as error:
        about["compiling"] = str(error)
    yield about
    yield from bandwidths(scene)


def bandwidths(scene: Scene) -> Rows:
    """The speeds of a copy and of a product of one row, in this order."""
    numbers = torch.ones(scene.choose(2**30, 2**20), dtype=torch.bfloat16, device=scene.device)
    target = torch.empty_like(numbers)
    ms = scene.median_ms(lambda: target.copy_(numbers), 10)
    yield {"bandwidth of": "a copy", "GB/s": 4 * numbers.numel() / ms / 1e6}
    config = random_config(scene.choose("llama3-8b", "little"))
    weight = numbers[: config.hidden_size * config.intermediate_size].view(config.intermediate_size, -1)
    row = torch.ones(1, config.hidden_size, dtype=torch.bfloat16, device=scene.device)
    ms = scene.median_ms(lambda: linear(row, weight), 20)
    yield {"bandwidth of": "a product of one row", "GB/s": 2 * weight.numel() / ms / 1e6}


def hops(scene: Scene) -> Rows:
    """A tensor's way from the device of one process to that of another, by transport and size."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two processes of one GPU, where NCCL is new enough for that
    there = importlib.util.find_spec("zmq") is not None and not scene.pretend
    for transport in ("unix", "ring", "zeromq", "collective") if there else ("unix", "ring"):
        for size in scene.choose((8192, 65536, 524288), (8192,)):
            series = hop.Series(transport, size, 1, scene.choose(200, 5), str(scene.device))
            try:
                (row,) = hop.measure_all([series])
                yield {name: row[name] for name in ("transport", "num_bytes", "median_us", "p99_us", "sender_us")}
            except (RuntimeError, ValueError, TimeoutError) as error:
                yield {"transport": transport, "num_bytes": size, "error": str(error)[:300]}
