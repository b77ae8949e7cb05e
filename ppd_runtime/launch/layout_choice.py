"""What the staged layout chooses where nothing is given, as functions of measured times: cuts, rows and candidates.

Measured numbers are rounded before anything is chosen by them, and cuts stay even but for a clear gain: what one
measurement has by chance should not decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ppd_runtime.checks import even_cuts, stage_layers
from ppd_runtime.config import USUAL_K
from ppd_runtime.layouts import StagedLayout

MOST_CHOSEN_ROWS = 8
_MOST_K = 5  # a further candidate is right in one token of a hundred
_DEAR = 0.5  # what a row may cost for there to be a second one
_CLEAR_GAIN = 0.95  # of the longest stage's time, for cuts that are not even
_HEADS, _ROWS = 4, 20  # parts of a layer, and of a pass, to which times are rounded


@dataclass(frozen=True)
class StageCosts:
    """What one device takes."""

    guess_head: float
    """To name candidates at a boundary, in passes of one layer over one token."""
    head: float
    """To choose a token behind the last layer, in the same."""
    row: float
    """What a further row of a pass adds, as a share of the first one's time."""

    @staticmethod
    def rounded(guess_head: float, head: float, row: float) -> "StageCosts":
        """From measured numbers; a row never costs more than a pass of its own."""
        row = min(max(round(_ROWS * row) / _ROWS, 0.0), 1.0)
        return StageCosts(round(_HEADS * guess_head) / _HEADS, round(_HEADS * head) / _HEADS, row)


def balanced_cuts(num_layers: int, stages: int, costs: StageCosts) -> tuple[int, ...]:
    """The cuts with which the longest stage, its head included, takes least; the even ones but for a clear gain."""
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
    """The most rows that together take at most twice one row's time; 1 where each further row costs more than half of
    one."""
    if costs.row > _DEAR:
        return 1
    return min(1 + int(1 / costs.row), MOST_CHOSEN_ROWS) if costs.row else MOST_CHOSEN_ROWS


def chosen_k(rows: int) -> int:
    """One candidate for each row of a pass, but 3 at least and 5 at most: a further candidate costs next to nothing."""
    return min(max(rows, USUAL_K), _MOST_K)


def choose_layout(
    num_layers: int,
    stages: int,
    costs: StageCosts | None,
    cuts: tuple[int, ...] | None = None,
    rows: int | None = None,
    k: int | None = None,
    most_k: int | None = None,
) -> StagedLayout:
    """What is given, and the rest by `costs`; without them even cuts, and rows of one.

    `most_k` is how many candidates there can be.
    """
    if not cuts:
        cuts = balanced_cuts(num_layers, stages, costs) if costs else even_cuts(num_layers, stages)
    rows = rows or (chosen_rows(costs) if costs else 1)
    k = k or min(chosen_k(rows), most_k or _MOST_K)
    return StagedLayout(cuts, rows, k, costs.row if costs else 0.0)
