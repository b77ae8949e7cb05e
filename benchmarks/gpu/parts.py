"""What the device is and what its parts cost: versions and ceilings, kernels, messages."""

import importlib.util
import os
from collections.abc import Callable

import torch
import transformers
from torch.nn.functional import linear

from benchmarks import hop
from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import shape_config
from ppd_runtime.models.compiled.toolkit import check_toolkit
from ppd_runtime.models.stage.layer_range import LayerRange

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
    numbers = torch.ones(scene.choose(2**30, 2**20), dtype=torch.bfloat16, device=scene.device)
    target = torch.empty_like(numbers)
    ms = scene.median_ms(lambda: target.copy_(numbers), 10)
    yield {"bandwidth of": "a copy", "GB/s": 4 * numbers.numel() / ms / 1e6}
    config = shape_config(scene.choose("llama3-8b", "little"))
    weight = numbers[: config.hidden_size * config.intermediate_size].view(config.intermediate_size, -1)
    row = torch.ones(1, config.hidden_size, dtype=torch.bfloat16, device=scene.device)
    ms = scene.median_ms(lambda: linear(row, weight), 20)
    yield {"bandwidth of": "a product of one row", "GB/s": 2 * weight.numel() / ms / 1e6}


def kernels_of(scene: Scene, call: Callable[[], object], layers: int) -> Row:
    """What a pass that has run before puts on the device, a layer, and its copies and waits; on a CPU the operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = scene.device.type == "cuda"
    call()
    scene.wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        call()
    events = profiler.events()
    done = [event.name.lower() for event in events if not on_gpu or event.device_type == DeviceType.CUDA]
    copies = sum("memcpy" in name for name in done)
    waits = sum("synchronize" in event.name.lower() for event in events)
    return {"kernels a layer": (len(done) - copies) / layers, "copies": copies, "waits": waits}


def run_one(stage: LayerRange, position: int) -> None:
    """One token's pass behind so many, which is forgotten again."""
    stage.run(0, stage.num_layers, [1], position)
    stage.truncate(position)


def hops(scene: Scene) -> Rows:
    """A tensor's way from the device of one process to that of another, by transport and size."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two processes of one GPU, where NCCL is new enough for that
    there = importlib.util.find_spec("zmq") is not None and not scene.pretend
    for transport in ("unix", "zeromq", "collective") if there else ("unix",):
        for size in scene.choose((8192, 65536, 524288), (8192,)):
            series = hop.Series(transport, size, 1, scene.choose(200, 5), str(scene.device))
            try:
                (row,) = hop.measure_all([series])
                yield {name: row[name] for name in ("transport", "num_bytes", "median_us", "p99_us", "sender_us")}
            except (RuntimeError, ValueError, TimeoutError) as error:
                yield {"transport": transport, "num_bytes": size, "error": str(error)[:300]}
