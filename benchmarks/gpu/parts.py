"""What the device is, its ceilings, and what messages cost."""

import importlib.util
import itertools
import os
from functools import partial

import torch
import transformers
from torch.nn.functional import linear

from benchmarks import hop
from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import random_config
from ppd_runtime.models.compiled.toolkit import check_toolkit
from ppd_runtime.models.stage.row_attention import ROWS
from ppd_runtime.models.stage.row_probe import product_keeps_rows

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


def products(scene: Scene) -> Rows:
    """Each product of Llama-3-8B's shapes: its speed with one row and with a padded pass' rows, and whether a row has
    the same bits in every place and beside all others.
    """
    config = random_config(scene.choose("llama3-8b", "little"))
    width, inner = config.hidden_size, config.intermediate_size
    of_keys = config.num_key_value_heads * config.head_dim
    shapes = {"q, o": (width, width), "k, v": (of_keys, width), "gate, up": (inner, width), "down": (width, inner)}
    for name, (outputs, inputs) in {**shapes, "head": (config.vocab_size, width)}.items():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.ones(outputs, inputs, dtype=dtype, device=scene.device)
            row: Row = {"product": name, "dtype": str(dtype).removeprefix("torch."), "outputs": outputs}
            for rows in (1, ROWS):
                states = torch.ones(1, rows, inputs, dtype=dtype, device=scene.device)
                ms = scene.median_ms(partial(linear, states, weight), scene.choose(20, 1))
                row[f"GB/s, rows: {rows}"] = weight.nbytes / ms / 1e6
            row["a row as alone"] = product_keeps_rows(outputs, inputs, dtype, scene.device, torch.get_num_threads())
            yield row


def hops(scene: Scene) -> Rows:
    """A tensor's way from the device of one process to that of another, by transport and size.

    After 1 ms a receiver that polls is awake; after 5 ms it sleeps.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # two processes of one GPU, where NCCL is new enough for that
    there = importlib.util.find_spec("zmq") is not None and not scene.pretend
    for transport in ("unix", "ring", "zeromq", "collective") if there else ("unix", "ring"):
        for size, pause in itertools.product(*scene.choose(((8192, 65536, 524288), (1, 5)), ((8192,), (1,)))):
            about = {"transport": transport, "num_bytes": size, "pause_ms": pause}
            try:
                series = hop.Series(transport, size, pause, scene.choose(200, 5), str(scene.device))
                (row,) = hop.measure_all([series])
                yield about | {name: row[name] for name in ("median_us", "p99_us", "sender_us")}
            except (RuntimeError, ValueError, TimeoutError) as error:
                yield about | {"error": str(error)[:300]}
