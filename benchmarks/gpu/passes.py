"""Passes of compiled and of eager layers: whether those that should have the same bits have them, and their times."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import bandwidths
from benchmarks.gpu.scene import Row, Rows, Scene
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.graphs import Recordings
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.row_attention import ROWS

_MANY_RECORDINGS, _PASSES_EACH = 70, 16
"""More than are kept, and as many passes of each as make room for others."""

ROWS_KEEP_THEIR_BITS = "rows of a pass, each as alone"
"""A column apart: the library's passes need not have this, nor anybody's in bfloat16, and then rows run one by one."""


def bits(scene: Scene) -> Rows:
    """Cuts, recordings, lengths, capacities, two stages in a process, and passes of several rows; in each dtype."""
    for dtype in scene.choose((torch.float32, torch.bfloat16), (torch.bfloat16,)):
        stage = scene.stage("small", dtype, *scene.choose((PassKind.ONE, PassKind.SEVERAL), ()))
        about = {"dtype": str(dtype).removeprefix("torch.")}
        near = [62, 63, 64, 65, 66, *scene.choose([998, 999, 1000, 1001], [])]
        whole = _states_at(stage, near, 2048)
        same = all(_whole_at_cut(stage, cut) for cut in range(1, stage.num_layers))
        yield about | {"checked": "every cut", "equal": same}
        same = all(map(torch.equal, whole, _states_at(stage, near, max(near) + 1)))
        yield about | {"checked": "two capacities, lengths around 64 and 1000", "equal": same}
        if recordings := _recordings(stage):
            with _launched(stage):
                same = all(map(torch.equal, whole, _states_at(stage, near, 2048)))
            yield about | {"checked": "recorded and launched", "equal": same}
            yield about | {"checked": "passes are recorded", "equal": recordings._works}
        at = range(40, 40 + _PASSES_EACH)
        many = [_states_at(stage, at, 64 + number)[0] for number in range(scene.choose(_MANY_RECORDINGS, 3))]
        same = all(torch.equal(many[0], states) for states in many)
        yield about | {"checked": "many recordings", "equal": same}
        other = scene.stage("small", dtype, *scene.choose((PassKind.ONE,), ()))
        both = [states for _ in range(2) for at in (stage, other) for states in _states_at(at, [40, 41], 100)]
        yield about | {"checked": "two stages in a process", "equal": all(map(torch.equal, both[:6], both[2:]))}
        for rows in scene.choose((2, 4, 8, 15), (2,)):
            yield about | {"rows": rows, ROWS_KEEP_THEIR_BITS: _rows_alone(stage, rows)}
        padded = scene.stage("small", dtype, padded=True)
        yield about | {"rows": f"{ROWS}, padded", ROWS_KEEP_THEIR_BITS: _rows_alone(padded, ROWS)}
        if scene.device.type == "cuda":
            yield about | {"checked": "padded passes read slots", "equal": padded.reads_slots}


def _states_at(stage: LayerRange, positions: Sequence[int], capacity: int) -> list[Tensor]:
    """The states behind one token at each of these positions, in rising order, of one text."""
    stage.begin(capacity)
    found, length = list[Tensor](), 0
    for position in positions:
        stage.run(0, stage.num_layers, [7] * (position - length), length) if position > length else None
        found.append(stage.run(0, stage.num_layers, [9], position))
        length = position + 1
    return found


def _whole_at_cut(stage: LayerRange, cut: int) -> bool:
    """Whether layers up to a cut and those behind it give what all give in one call."""
    (whole,) = _states_at(stage, [70], 80)
    stage.truncate(70)
    half = stage.run(0, cut, [9], 70)
    return torch.equal(stage.run(cut, stage.num_layers, half, 70), whole)


def _recordings(stage: LayerRange) -> Recordings | None:
    return getattr(getattr(stage._compiled, "_passes", None), "_recordings", None)


@contextlib.contextmanager
def _launched(stage: LayerRange) -> Iterator[None]:
    """Launch each layer by itself until the block ends."""
    passes = stage._compiled._passes  # type: ignore[union-attr]
    kept, passes._recordings = passes._recordings, None
    try:
        yield
    finally:
        passes._recordings = kept


@contextlib.contextmanager
def _recorded(stage: LayerRange) -> Iterator[None]:
    """Record passes of layers of any size until the block ends, to see whether that pays."""
    passes: Any = getattr(stage._compiled, "_passes", None)
    if not _recordings(stage):
        yield
        return
    kept, passes.largest_recorded = passes.largest_recorded, math.inf
    try:
        yield
    finally:
        passes.largest_recorded = kept


def _rows_alone(stage: LayerRange, rows: int) -> bool:
    """Whether a chain's tokens have the states that each has alone."""
    alone = _states_at(stage, range(40, 40 + rows), 100)
    stage.truncate(40)
    return torch.equal(stage.run(0, stage.num_layers, [9] * rows, 40), torch.cat(alone, dim=1))


def llama(scene: Scene) -> Rows:
    """One-token passes of Llama-3-8B's shape, eager, launched, recorded and padded: milliseconds, the share of the
    bandwidth of a copy, and what each pass asks for.
    """
    copy = next(bandwidths(scene))["GB/s"]
    for kinds, ways in (((), ("eager",)), ((PassKind.ONE,), ("launched", "recorded")), ((), ("padded",))):
        stage = scene.stage("llama3-8b", torch.bfloat16, *kinds, padded=ways == ("padded",))
        for way in ways:
            if way == "recorded" and not _recordings(stage):
                continue
            with _launched(stage) if way == "launched" else _recorded(stage):
                for length in scene.choose((128, 1024, 4096), (64,)):
                    row = _pass_of(scene, stage, length)
                    yield {"passes": way, "after": length, "% of a copy's": 100 * row["GB/s"] / copy} | row
        del stage
        if scene.device.type == "cuda":
            torch.cuda.empty_cache()


def _pass_of(scene: Scene, stage: LayerRange, length: int) -> Row:
    stage.begin(length + 64)
    stage.run(0, stage.num_layers, [1] * length, 0)

    def one_token(head: bool) -> None:
        states = stage.run(0, stage.num_layers, [1], length)
        if head:
            stage.logits(states).argmax().item()
        stage.truncate(length)

    first_ms = scene.ms(partial(one_token, True))  # with a recording, where passes are recorded
    ms, layers_ms = (scene.median_ms(partial(one_token, head), scene.choose(20, 2)) for head in (True, False))
    embedding, output = stage.model.model.embed_tokens.weight, stage.model.lm_head.weight
    read = sum(weight.nbytes for weight in stage.model.parameters())
    if embedding.data_ptr() != output.data_ptr():
        read -= embedding.nbytes  # a token reads one row of it
    row: Row = {"ms": ms, "layers, ms": layers_ms, "first, ms": first_ms, "GB/s": read / ms / 1e6}
    return row | _kernels_of(scene, partial(one_token, True), stage.num_layers)


def _kernels_of(scene: Scene, call: Callable[[], object], layers: int) -> Row:
    """What a pass that has run before puts on the device, a layer, and its copies and waits; on a CPU the operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = scene.device.type == "cuda"
    scene.wait()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        call()
    events = profiler.events()
    done = [event.name.lower() for event in events if not on_gpu or event.device_type == DeviceType.CUDA]
    copies = sum("memcpy" in name for name in done)
    waits = sum("synchronize" in event.name.lower() for event in events)
    return {"kernels a layer": (len(done) - copies) / layers, "copies": copies, "waits": waits}
