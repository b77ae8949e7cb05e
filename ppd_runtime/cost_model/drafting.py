"""What drafters at boundary 0 gain, as functions of plain numbers: on one stage.

A drafter names tokens before any layer has run for them. A guess' chance is how likely it is right if all guesses
before it on its path are; its path chance is the product of the chances along its path.

Every function raises a ValueError for chances outside [0, 1] and negative costs.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ppd_runtime.settings.checks import check_number, check_share


def chain(chances: Sequence[float]) -> tuple[float, ...]:
    """Path chances of guesses one behind the other: `p1, p1·p2, …`."""
    for chance in chances:
        check_share("chances", chance)
    return tuple(accumulate(chances, mul))


def tokens_per_pass(path_chances: Sequence[float]) -> float:
    """E[tokens] that one pass decides: one by the certain token's row, and one by each row whose guess is right.

    That is 1 and the sum of the guesses' path chances.
    """
    for chance in path_chances:
        check_share("path_chances", chance)
    return 1 + math.fsum(path_chances)


def speedup(path_chances: Sequence[float], row_cost: float, draft_cost: float) -> float:
    """One stage's speed-up over ordinary decoding: `E[tokens] / (1 + row_cost·(rows − 1) + draft_cost)`.

    Costs are shares of a one-row pass: a further row's, and all drafting's between two passes. If rows cost nothing, it
    is the inverse of `theory.drafting_ratio`.
    """
    check_number("row_cost", row_cost)
    check_number("draft_cost", draft_cost)
    return tokens_per_pass(path_chances) / (1 + row_cost * len(path_chances) + draft_cost)
