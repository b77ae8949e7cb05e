"""One token's compiled pass taken apart: its products by what they are for, attention, the head, and what is left.

    python -m benchmarks.pass_ledger --weights int8 --json figures.json

Every part runs over the weights that the pass itself reads, in turn with the pass, on one core, behind a text of
`--position` tokens; medians, the first round dropped. What a call takes from Python is measured with next to no
weights, and left out. What is left of the pass are norms, rotary embedding, activation, entries for the cache, and
calls.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from ppd_runtime.config import FORMATS
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.models.checkpoint.description import ModelInfo, describe
from ppd_runtime.models.checkpoint.loading import bfloat16_weights, load_layers
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.attention import few_tokens_attention
from ppd_runtime.models.native.products import PRODUCTS, product
from ppd_runtime.models.stage.caches import whole_rows
from ppd_runtime.models.stage.stage import Stage

PARTS: Mapping[str, Sequence[str]] = {
    "queries, keys, values": ("q_proj", "k_proj", "v_proj"),
    "attention's output": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""A layer's products, each one call, by their linear layers' names in the library."""
_ATTENTION, _HEAD, _PASS, _CALL, _REST = "attention", "norm and head", "layers", "a call", "the rest of the layers"


def measure(options: argparse.Namespace) -> Figures:
    """Run everything in turn, on one core; the figures by name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with model_folder(options.model) as model, on_cores([max(os.sched_getaffinity(0))]), torch.inference_mode():
            return _measure(options, describe(model, options.weights))
    finally:
        torch.set_num_threads(threads)


def _measure(options: argparse.Namespace, info: ModelInfo) -> Figures:
    model = load_layers(info, info.num_layers, torch.float32, "cpu")
    shared = {} if info.weights else bfloat16_weights(info, info.num_layers)
    compiled = CompiledLayers(model, compile_ahead(info, torch.float32, "cpu"), shared)
    stage = Stage(model, compiled, 0, info.longest_in_chunks)
    stage.begin(options.position + 1)
    stage.run(0, stage.num_layers, [7] * options.position, 0)
    weights = [compiled.weights_read(layer) for layer in range(stage.num_layers)]
    calls = _calls(stage, weights, options.position)
    ways: dict[str, Callable[[], object]] = {name: _one_by_one(some) for name, some in calls.items()}
    hidden = torch.randn(1, 1, stage.model.config.hidden_size)
    ways |= {_PASS: lambda: _pass(stage, options.position), _HEAD: lambda: stage.logits(hidden)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            times[name].append(1e6 * (time.perf_counter() - began))
    us = {name: statistics.median(found[1:]) for name, found in times.items()}
    call = us.pop(_CALL) / len(calls[_CALL])
    us |= {name: us[name] - call * len(calls[name]) for name in (*PARTS, _ATTENTION)}
    us[_REST] = us[_PASS] - sum(us[name] for name in (*PARTS, _ATTENTION))
    read = {name: sum(of[key].nbytes for of in weights for key in _of_part(of, some)) for name, some in PARTS.items()}
    about = {"model": options.model, "weights": options.weights or "as stored", "layers": stage.num_layers}
    return {**about, "position": options.position, "rounds": options.rounds, "call_us": call, "us": us, "bytes": read}


def _calls(stage: Stage, weights: Sequence[Mapping[str, Tensor]], position: int) -> dict[str, list[Callable[[], None]]]:
    """Each part's, one for each layer, and as many that do next to nothing."""
    calls: dict[str, list[Callable[[], None]]] = {}
    first_layer = stage.model.model.layers[0].named_modules()
    inputs = {path.rpartition(".")[2]: linear.in_features for path, linear in first_layer if path.endswith("_proj")}
    for name, linears in PARTS.items():
        calls[name] = []
        for of_layer in weights:
            some = [of_layer[key] for key in _of_part(of_layer, linears)]
            if len(some) != len(linears):
                raise ValueError(f"--model: its layers have no {', '.join(linears)}; give one of Llama's kind")
            calls[name].append(PRODUCTS[len(some) - 1].bound(torch.randn(1, inputs[linears[0]]), *some))
    attended = _attention(stage.model.config, position)
    calls[_ATTENTION] = [few_tokens_attention.bound(*attended()) for _ in weights]
    calls[_CALL] = [product.bound(torch.ones(1, 1), torch.ones(1, 1)) for _ in weights]
    return calls


def _of_part(of_layer: Mapping[str, Tensor], linears: Sequence[str]) -> list[str]:
    return [key for name in linears for key in of_layer if key.endswith(f".{name}.weight")]


def _attention(config: Any, position: int) -> Callable[[], tuple[Any, ...]]:
    """What attention takes in a layer's pass."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    dim, rows = getattr(config, "head_dim", None) or config.hidden_size // heads, whole_rows(position + 1)
    where, text = torch.tensor([[position], [position], [0]]), torch.arange(position + 1)[None]

    def tensors() -> tuple[Any, ...]:
        keys, values = (torch.randn(rows, shared, dim).transpose(0, 1)[None] for _ in range(2))
        return torch.randn(1, heads, 1, dim), keys, values, where, text, dim**-0.5, 0.0

    return tensors


def _one_by_one(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def _pass(stage: Stage, position: int) -> None:
    stage.run(0, stage.num_layers, [7], position)
    stage.truncate(position)


def table(figures: Figures) -> str:
    """A row for each part, in Markdown."""
    us, read, whole = figures["us"], figures["bytes"], figures["us"][_PASS]
    rows = []
    for name in (*PARTS, _ATTENTION, _REST, _PASS, _HEAD):
        speed = f"{read[name] / us[name] / 1e3:.1f}" if name in read else None
        of_layers = f"{us[name] / whole:.0%}" if name != _HEAD else None
        rows.append([figures["model"], figures["weights"], name, f"{us[name]:.0f}", of_layers, speed])
    return markdown(["model", "weights", "part", "µs a token", "of the layers", "weights, GB/s"], rows)


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--weights", choices=FORMATS, help="their format; default: as the model's files have them")
    options.add_argument("--position", type=positive, default=100, help="tokens before the pass")
    options.add_argument("--rounds", type=positive, default=101)
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
