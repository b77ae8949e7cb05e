"""One-token passes of Llama-3-8B's shape against the device's bandwidth, and what that predicts for several GPUs."""

import json
from contextlib import suppress
from functools import partial
from itertools import chain

import torch

from benchmarks.gpu.bits import _recordings
from benchmarks.gpu.parts import bandwidths, kernels_of, run_one
from benchmarks.gpu.scene import Row, Rows, Scene
from benchmarks.models import shape_config
from ppd_runtime.checks import even_cuts
from ppd_runtime.cost_model.staged import GPT_FAST_ALL_REDUCE_MS, tensor_parallel_time, token_time
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange

_SHARES_OF_RIGHT = 0.8
"""Of tokens that boundary 1 names, and of the rest, each later one: about the demo model's with k = 3."""
_FORETOLD = (2, 4, 8)


def llama(scene: Scene) -> Rows:
    """Eager, launched and recorded: milliseconds, share of the bandwidth of a copy, and what each pass asks for."""
    copy = _copy_bandwidth(scene)
    for kinds, ways in (((), ("eager",)), ((PassKind.ONE,), ("launched", "recorded"))):
        stage = scene.stage("llama3-8b", torch.bfloat16, *kinds)
        for way in ways:
            if way == "recorded" and not _recordings(stage):
                continue
            if way == "launched":
                kept, stage._compiled._passes._recordings = stage._compiled._passes._recordings, None  # type: ignore[union-attr]
            for length in scene.choose((128, 1024, 4096), (64,)):
                row = _pass_of(scene, stage, length)
                yield {"passes": way, "after": length, "% of a copy's": 100 * row["GB/s"] / copy} | row
            if way == "launched":
                stage._compiled._passes._recordings = kept  # type: ignore[union-attr]
        del stage
        if scene.device.type == "cuda":
            torch.cuda.empty_cache()


def _copy_bandwidth(scene: Scene) -> float:
    """GB/s that a copy reads and writes, as the stage `versions` has found, or found now."""
    rows = chain(_found(scene), bandwidths(scene))
    return float(next(row["GB/s"] for row in rows if row.get("bandwidth of") == "a copy"))


def _pass_of(scene: Scene, stage: LayerRange, length: int) -> Row:
    stage.begin(length + 64)
    stage.run(0, stage.num_layers, [1] * length, 0)

    def one_token() -> None:
        stage.logits(stage.run(0, stage.num_layers, [1], length)).argmax().item()
        stage.truncate(length)

    ms = scene.median_ms(one_token, scene.choose(20, 2))
    layers = scene.median_ms(partial(run_one, stage, length), scene.choose(20, 2))
    weights = sum(w.numel() * w.element_size() for w in stage.model.parameters()) - _embedding_bytes(stage)
    row: Row = {"ms": ms, "layers, ms": layers, "GB/s": weights / ms / 1e6}
    return row | kernels_of(scene, one_token, stage.num_layers)


def _embedding_bytes(stage: LayerRange) -> int:
    """A token reads one row of it; tied to the head, it is read whole."""
    embedding = stage.model.model.embed_tokens.weight
    return 0 if embedding.data_ptr() == stage.model.lm_head.weight.data_ptr() else embedding.nbytes


def forecast(scene: Scene) -> Rows:
    """Stages against tensor parallelism, from the fastest passes and the hop of 8 KB that earlier
    stages of the benchmark found.
    """
    found = _found(scene)
    passes = min((row for row in found if "layers, ms" in row), key=lambda row: row["ms"], default=None)
    hops = [row["median_us"] for row in found if row.get("num_bytes") == 8192 and "median_us" in row]
    if passes is None or not hops:
        raise ValueError("nothing to go by: the stages llama and hops have found nothing")
    layers = shape_config(scene.choose("llama3-8b", "little")).num_hidden_layers
    layer_ms, head_ms = passes["layers, ms"] / layers, max(passes["ms"] - passes["layers, ms"], 0.0)
    times = Times(layer=layer_ms, hop=min(hops) / 1000, exit_head=head_ms, head=head_ms)
    for devices in _FORETOLD:
        if devices > layers:
            continue
        right = [_SHARES_OF_RIGHT * (1 - _SHARES_OF_RIGHT) ** boundary for boundary in range(devices - 1)]
        staged = token_time(layers, even_cuts(layers, devices), (*right, 1 - sum(right)), times)
        whole = Times(layer=layer_ms, head=head_ms)
        low, high = (tensor_parallel_time(layers, devices, whole, a) for a in GPT_FAST_ALL_REDUCE_MS)
        yield {
            "GPUs": devices,
            "ordinary, ms a token": passes["ms"],
            "stages, by the formula": staged,
            "tensor parallel, all-reduce 18 µs": low,
            "29 µs": high,
        }


def _found(scene: Scene) -> list[Row]:
    rows: list[Row] = []
    with suppress(OSError):
        for line in (scene.out / "stages.jsonl").read_text().splitlines():
            rows += json.loads(line)["rows"]
    return rows
