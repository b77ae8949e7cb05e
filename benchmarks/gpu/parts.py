"""What the device is and what its parts cost: versions and ceilings, kernels, the sampler."""

import importlib.util
import statistics
from collections.abc import Callable

import torch
import transformers
from torch.nn.functional import linear

from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import shape_config
from ppd_runtime.models.compiled.toolkit import check_toolkit
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams

_OPTIONAL = ("ray", "zmq", "triton", "msgpack", "safetensors")


def versions(scene: Scene) -> Rows:
    """What is there, and the ceilings: copies and products of one row."""
    lacking = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "lacks": ", ".join(lacking)}
    if scene.device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(scene.device)
        nccl = torch.cuda.nccl.version() if hasattr(torch.cuda, "nccl") else None
        about |= {"gpu": of_gpu.name, "GB": of_gpu.total_memory / 1e9, "cuda": torch.version.cuda, "nccl": str(nccl)}
    about["compiling"] = _complaint()
    yield about
    yield from bandwidths(scene)


def _complaint() -> str:
    try:
        check_toolkit()
    except ValueError as error:
        return str(error)
    return "can be done"


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


def sampler(scene: Scene) -> Rows:
    """The same logits again and again: the same token each time, and what a choice takes."""
    size = scene.choose(128256, 1000)
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(scene.device)
    logits[: size // 2] = logits[0]  # as many ties as there can be at top-p's border
    ways = {"T = 0": {}, "T = 1": {"temperature": 1.0}, "top_p = 0.9": {"temperature": 1.0, "top_p": 0.9}}
    for way, settings in ways.items():
        choose, rounds = Sampler(SamplingParams(seed=1, **settings)), scene.choose(200, 5)  # type: ignore[arg-type]
        tokens: list[int] = []
        times = scene.milliseconds(lambda: tokens.append(choose.choose(logits, [1, 2, 3])), rounds)  # noqa: B023
        yield {"sampled with": way, "times": rounds, "equal": len(set(tokens)) == 1, "ms": statistics.median(times)}
