"""One-token passes of Llama-3-8B's shape against the device's bandwidth."""

import json
from contextlib import suppress
from functools import partial
from itertools import chain

import torch

from benchmarks.gpu.bits import _recordings
from benchmarks.gpu.parts import bandwidths, kernels_of, run_one
from benchmarks.gpu.scene import Row, Rows, Scene
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange


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


def _found(scene: Scene) -> list[Row]:
    rows: list[Row] = []
    with suppress(OSError):
        for line in (scene.out / "stages.jsonl").read_text().splitlines():
            rows += json.loads(line)["rows"]
    return rows
