"""The staged layout's defaults of cuts, rows and candidates, as functions of measured times.

Measured numbers are rounded first, and cuts stay even unless the gain is clear: noise of one measurement should not
decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ppd_runtime.settings.checks import even_cuts, stage_layers
from ppd_runtime.settings.config import USUAL_K
from ppd_runtime.settings.layouts import StagedLayout

MOST_CHOSEN_ROWS = 8
_MOST_K = 5  # a further candidate is right in one token of a hundred
_FREE_ROWS, _FREE_K = 16, 8  # where a further row costs nothing
_DEAR = 0.5  # most that a row may cost for a second one
_CLEAR_GAIN = 0.95  # share of the longest stage's time, for uneven cuts
_HEADS, _ROWS = 4, 20  # times are rounded to these parts of a layer, and of a pass


@dataclass(frozen=True)
class StageCosts:
    """Costs of one device."""

    guess_head: float
    """Naming candidates at a boundary, in passes of one layer over one token."""
    head: float
    """Choosing a token after the last layer, in the same."""
    row: float
    """What a further row of a pass adds, as a share of the first one's time."""

    @staticmethod
    def rounded(guess_head: float, head: float, row: float) -> "StageCosts":
        """From measured numbers; a row never costs more than a pass of its own."""
        row = min(max(round(_ROWS * row) / _ROWS, 0.0), 1.0)
        return StageCosts(round(_HEADS * guess_head) / _HEADS, round(_HEADS * head) / _HEADS, row)


def balanced_cuts(num_layers: int, stages: int, costs: StageCosts) -> tuple[int, ...]:
    """The cuts with which the longest stage, its head included, takes least; even cuts unless the gain is clear."""
    heads = [costs.guess_head] * (stages - 1) + [costs.head]

    def longest(cuts: Sequence[int]) -> float:
        return max(layers + head for layers, head in zip(stage_layers(num_layers, cuts), heads, strict=True))

    even, layers = even_cuts(num_layers, stages), [1] * stages
    for _ in range(num_layers - stages):
        shortest = min(range(stages), key=lambda stage: layers[stage] + heads[stage])
        layers[shortest] += 1
    cuts = tuple(accumulate(layers[:-1]))
    return cuts if longest(cuts) <= _CLEAR_GAIN * longest(even) else even


def chosen_rows(costs: StageCosts) -> int:
    """The most rows that together take at most twice one row's time, up to 8, or 16 where they cost nothing; 1 if each
    further row costs more than half of one."""
    if costs.row > _DEAR:
        return 1
    return min(1 + int(1 / costs.row), MOST_CHOSEN_ROWS) if costs.row else _FREE_ROWS


def chosen_k(rows: int) -> int:
    """One candidate for each row of a pass, but 3 at least and 5 at most, or 8 where rows cost nothing: a further
    candidate costs next to nothing."""
    return min(max(rows, USUAL_K), _MOST_K if rows <= MOST_CHOSEN_ROWS else _FREE_K)


def choose_layout(
    num_layers: int,
    stages: int,
    costs: StageCosts | None,
    cuts: tuple[int, ...] | None = None,
    rows: int | None = None,
    k: int | None = None,
    most_k: int | None = None,
) -> StagedLayout:
    """The given values, the rest by `costs`; without costs, even cuts and one row.

    `most_k` is how many candidates there can be.
    """
    if stages == 1:
        cuts = ()
    elif not cuts:
        cuts = balanced_cuts(num_layers, stages, costs) if costs else even_cuts(num_layers, stages)
    rows = rows or (chosen_rows(costs) if costs else 1)
    k = k or min(chosen_k(rows), most_k or _FREE_K)
    return StagedLayout(cuts, rows, k, costs.row if costs else 0.0)
