"""What the device is and what its parts cost: versions and ceilings, compiling, the library's passes, the sampler."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import transformers
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu.scene import Row, Rows, Scene, name_of
from benchmarks.models import shape_config
from ppd_runtime.models.compiled.toolkit import check_toolkit
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSubset, without
from ppd_runtime.sampling import Sampler
from ppd_runtime.sampling_params import SamplingParams

_OPTIONAL = ("ray", "zmq", "triton", "msgspec", "safetensors")
_LENGTHS = (128, 1024, 4096)
_CHAIN = 4
_KINDS = {
    "one token": PassKind.ONE,
    "a chain": PassKind.SEVERAL,
    "three candidates": 3,
    "without attention": PassKind.WITHOUT_ATTENTION,
    "without MLP": PassKind.WITHOUT_MLP,
}


def versions(scene: Scene) -> Rows:
    """What is there, and the ceilings: copies, products of one row, attention by backend."""
    lacking = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "lacks": ", ".join(lacking)}
    if scene.device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(scene.device)
        nccl = torch.cuda.nccl.version() if hasattr(torch.cuda, "nccl") else None
        about |= {"gpu": of_gpu.name, "GB": of_gpu.total_memory / 1e9, "cuda": torch.version.cuda, "nccl": str(nccl)}
    about["compiling"] = _complaint()
    yield about
    yield from bandwidths(scene)
    yield from _attention(scene)


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


def _attention(scene: Scene) -> Rows:
    """One token's over grouped heads; None where a backend does not take it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = shape_config(scene.choose("llama3-8b", "little"))
    backends = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    for length in scene.choose(_LENGTHS, (64,)):
        found: Row = {"one token's attention, ms, over": length}
        query, key, value = (
            torch.ones(1, heads, rows, config.head_dim, dtype=torch.bfloat16, device=scene.device)
            for heads, rows in ((config.num_attention_heads, 1), *[(config.num_key_value_heads, length)] * 2)
        )
        for name in backends:
            try:
                with sdpa_kernel([getattr(SDPBackend, name)]):
                    found[name] = scene.median_ms(
                        lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True),  # noqa: B023
                        10,
                    )
            except RuntimeError:
                found[name] = None
        yield found


def compiling(scene: Scene) -> Rows:
    """Every kind of pass in each dtype: seconds, and what a launched pass asks of the device."""
    for dtype in scene.choose(scene.dtypes, scene.dtypes[1:]):  # pretended: with the code that `llama` needs too
        for what, kind in kinds_tried(scene).items():
            began = time.perf_counter()
            stage = scene.stage("small", dtype, *{PassKind.ONE, kind})
            row: Row = {"passes over": what, "dtype": name_of(dtype), "seconds": time.perf_counter() - began}
            text = scene.choose(1030, 70)
            stage.begin(text + 64)
            stage.run(0, stage.num_layers, [1] * text, 0)
            run_pass = partial(_run_kind, stage, kind, _piece(stage, kind), text)
            row |= kernels_of(scene, run_pass, stage.num_layers)
            if scene.device.type == "cuda":
                yield {"checked": f"{what}: no copy of a cache", "dtype": name_of(dtype)} | _no_copy(stage, run_pass)
            yield row


def kinds_tried(scene: Scene) -> Mapping[str, int]:
    """By what they are called in the report."""
    fewer = ("one token", "without attention")
    return scene.choose(_KINDS, {what: _KINDS[what] for what in fewer})


def _piece(stage: LayerRange, kind: int) -> LayerSubset | None:
    """Layers without what the kind leaves out; without attention all but the first, which says where a pass stands."""
    layers = dict(enumerate(stage.model.model.layers))
    if kind == PassKind.WITHOUT_MLP:
        return stage.subset({i: without(layer, mlp=True) for i, layer in layers.items()}, (*layers,), (*layers,))
    if kind == PassKind.WITHOUT_ATTENTION:
        return stage.subset({i: without(layer, attention=True) if i else layer for i, layer in layers.items()}, (0,))
    return None


def _run_kind(stage: LayerRange, kind: int, piece: LayerSubset | None, position: int) -> None:
    if piece:
        stage.run_subset(piece, [1], position)
    elif kind > PassKind.ONE:
        stage.run_candidates(range(kind), position)
    else:
        stage.run(0, stage.num_layers, [1] * (1 if kind == PassKind.ONE else _CHAIN), position)
    stage.truncate(position)


def _no_copy(stage: LayerRange, run_pass: Callable[[], object]) -> Row:
    """Whether a pass takes less memory meanwhile than one layer's keys of the text have."""
    keys = next(layer.rows[0] for layer in stage.cache.layers if layer.rows)
    run_pass()
    torch.cuda.reset_peak_memory_stats(stage.device)
    before = torch.cuda.memory_allocated(stage.device)
    run_pass()
    taken = torch.cuda.max_memory_allocated(stage.device) - before
    return {"bytes taken": taken, "of keys": keys.nbytes, "equal": taken < keys.nbytes}


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


def eager(scene: Scene) -> Rows:
    """The library's one-token passes at length after length, with cuDNN's attention and without."""
    stage = scene.stage("small", torch.bfloat16)
    lengths = scene.choose(range(100, 140), range(8, 10))
    for uses in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(uses)
        stage.begin(max(lengths) + 1)
        stage.run(0, stage.num_layers, [1] * min(lengths), 0)
        times: list[float] = []
        for position in lengths:
            times += scene.milliseconds(partial(run_one, stage, position), 1, warm_up=0)
            stage.run(0, stage.num_layers, [1], position)
        yield {
            "cuDNN's attention": uses,
            "lengths": len(lengths),
            "ms, median": statistics.median(times),
            "longest": max(times),
        }


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
