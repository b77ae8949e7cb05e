"""Whether passes that should have the same bits have them, on this device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.scene import Rows, Scene, name_of
from ppd_runtime.models.compiled.aoti_passes import LaunchedPasses
from ppd_runtime.models.compiled.graphs import Recordings
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange

_MANY_RECORDINGS, _PASSES_EACH = 70, 16
"""More than are kept, and as many passes of each as make room for others."""

ROWS_KEEP_THEIR_BITS = "{} rows of a pass, each as alone"
"""The library's passes need not have this, nor anybody's in bfloat16: where they lack it, rows run one by one."""


def bits(scene: Scene) -> Rows:
    """Cuts, recordings, lengths, capacities, two stages in a process, and passes of several rows; in each dtype."""
    for dtype in scene.choose((torch.float32, torch.bfloat16), (torch.bfloat16,)):
        stage = scene.stage("small", dtype, *scene.choose((PassKind.ONE, PassKind.SEVERAL), ()))
        about = {"dtype": name_of(dtype)}
        near = [62, 63, 64, 65, 66, *scene.choose([998, 999, 1000, 1001], [])]
        whole = states_at(stage, near, 2048)
        yield about | {"checked": "every cut", "equal": all(whole_at_cut(stage, cut) for cut in _cuts(stage))}
        same = all(map(torch.equal, whole, states_at(stage, near, max(near) + 1)))
        yield about | {"checked": "two capacities, lengths around 64 and 1000", "equal": same}
        if recordings := _recordings(stage):
            same = all(map(torch.equal, whole, _launched(stage, near)))
            yield about | {"checked": "recorded and launched", "equal": same}
            yield about | {"checked": "passes are recorded", "equal": recordings._works}
        at = range(40, 40 + _PASSES_EACH)
        many = [states_at(stage, at, 64 + number)[0] for number in range(scene.choose(_MANY_RECORDINGS, 3))]
        same = all(torch.equal(many[0], states) for states in many)
        yield about | {"checked": "many recordings", "equal": same}
        other = scene.stage("small", dtype, *scene.choose((PassKind.ONE,), ()))
        both = [states for _ in range(2) for at in (stage, other) for states in states_at(at, [40, 41], 100)]
        yield about | {"checked": "two stages in a process", "equal": all(map(torch.equal, both[:6], both[2:]))}
        for rows in scene.choose((2, 4, 8, 15), (2,)):
            yield about | {"checked": ROWS_KEEP_THEIR_BITS.format(rows), "equal": _rows_alone(stage, rows)}


def states_at(stage: LayerRange, positions: Sequence[int], capacity: int) -> list[Tensor]:
    """The states behind one token at each of these positions, in rising order, of one text."""
    stage.begin(capacity)
    found, length = list[Tensor](), 0
    for position in positions:
        stage.run(0, stage.num_layers, [7] * (position - length), length) if position > length else None
        found.append(stage.run(0, stage.num_layers, [9], position))
        length = position + 1
    return found


def whole_at_cut(stage: LayerRange, cut: int) -> bool:
    """Whether layers up to a cut and those behind it give what all give in one call."""
    (whole,) = states_at(stage, [70], 80)
    stage.truncate(70)
    half = stage.run(0, cut, [9], 70)
    return torch.equal(stage.run(cut, stage.num_layers, half, 70), whole)


def _cuts(stage: LayerRange) -> range:
    return range(1, stage.num_layers)


def _recordings(stage: LayerRange) -> Recordings | None:
    passes = getattr(stage._compiled, "_passes", None)
    return passes._recordings if isinstance(passes, LaunchedPasses) else None


def _launched(stage: LayerRange, positions: Sequence[int]) -> list[Tensor]:
    """As `states_at`, each layer launched by itself."""
    passes = stage._compiled._passes  # type: ignore[union-attr]
    kept, passes._recordings = passes._recordings, None
    try:
        return states_at(stage, positions, 2048)
    finally:
        passes._recordings = kept


def _rows_alone(stage: LayerRange, rows: int) -> bool:
    """Whether a chain's tokens have the states that each has alone."""
    alone = states_at(stage, range(40, 40 + rows), 100)
    stage.truncate(40)
    return torch.equal(stage.run(0, stage.num_layers, [9] * rows, 40), torch.cat(alone, dim=1))
