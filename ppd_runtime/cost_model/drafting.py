"""What drafters at boundary 0 gain, as functions of plain numbers: on one stage, on several, and a draft model.

A drafter names tokens before any layer has run for them. A guess' chance is how likely it is right if all guesses
before it on its path are; its path chance is the product of the chances along its path.

Every function raises a ValueError for chances outside [0, 1] and negative costs.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ppd_runtime.cost_model.staged import check_shares
from ppd_runtime.settings.checks import check_number, check_share, check_whole


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


def expected_first_boundary(shares: Sequence[float], rows: int) -> float:
    """E[J] with boundary 0, the stage times that a token costs on average; `shares` are those of J = 0, 1, …, N.

    A token that boundary 0 names enters in the pass of the token before it (J = 0), one stage time before boundary 1
    could name it. At most `rows` tokens of one path enter in one pass, the next one in the next pass (J = 1). Let
    boundary 0 be right with chance p0 behind every token. On average M = 1 + p0 + … + p0^(rows − 1) tokens enter
    together, and with chance p0^rows it names one more. So `E[J] = Σ j·share(j) + p0^rows / M`.

    `Stats.first_boundary`, measured rates and `staged.expected_first_boundary` count boundary 0 with boundary 1. That
    is this formula for one row a pass, p0 more than for rows without bound. With one stage, E[J] is 1 / M.
    """
    check_shares(shares)
    check_whole("rows", rows, 1)
    *together, one_more = (shares[0] ** row for row in range(rows + 1))
    return math.fsum(j * share for j, share in enumerate(shares)) + one_more / math.fsum(together)


def draft_model_time(chance: float, draft: float, stages: int, stage: float, waits_for: int = 0) -> float:
    """Time of a token where a draft model on a device of its own drafts on while `stages` stages verify.

    The draft model is right with the chance a, whatever came before, and takes D = `draft` for a token; a stage takes
    s = `stage`, and ordinary decoding T = N·s. Texts consist of runs: right guesses up to a mistake, and the token that
    the last stage puts in its place. A run has 1/(1 − a) tokens on average.

    If D ≥ s, each guess enters alone and its decision comes D after the one before it, and a mistake's T after its
    parent's: `a·D + (1 − a)·T`. If D < s, a pass takes up to n = s/D guesses, and a run lasts T for its first token and
    s for each further pass that has a right guess of its own. With g guesses (`waits_for`) beside the first token, for
    which its pass waits g·D, pass j from 0 on has one with the chance a^(1 + g + j·n), so there are
    `a^(g + 1)/(1 − aⁿ)` of them: `(1 − a)·(T + g·D + s·a^(g + 1)/(1 − aⁿ))`.
    """
    check_share("chance", chance)
    check_number("draft", draft)
    check_number("stage", stage)
    check_whole("stages", stages, 1)
    check_whole("waits_for", waits_for, 0)
    whole = stages * stage
    if draft >= stage:
        return chance * draft + (1 - chance) * whole
    if chance == 1:
        return draft
    further = chance ** (waits_for + 1) / (1 - chance ** (stage / draft)) if draft else chance ** (waits_for + 1)
    return (1 - chance) * (whole + waits_for * draft + stage * further)
