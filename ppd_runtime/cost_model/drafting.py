"""What drafters at boundary 0 gain, as functions of plain numbers: on one stage, on several, on a device of their own.

A drafter names tokens before any layer has run for them. A guess' chance is how likely it is right if all guesses
before it on its path are; its path chance is the product of the chances along its path.

Every function raises a ValueError for chances outside [0, 1], negative times or costs, and too few rows or stages.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from operator import mul

from ppd_runtime.cost_model.staged import check_shares
from ppd_runtime.settings.checks import check_number, check_share, check_whole


def chain(chances: Sequence[float]) -> tuple[float, ...]:
    """Path chances of guesses one behind the other: `p1, p1·p2, …`."""
    for chance in chances:
        check_share("chances", chance)
    return tuple(accumulate(chances, mul))


def best_tree(chances: Sequence[Sequence[float]], rows: int) -> dict[tuple[int, ...], float]:
    """The `rows` − 1 guesses behind the newest certain token that give most tokens a pass, the likeliest first.

    Keys are the ranks (from 0) along a guess' path, values are path chances. `chances` are by depth and rank, the same
    behind every guess of the depth before. No guess is likelier than the one before it on its path. So the likeliest
    guesses form a tree, and taking the likeliest candidate each time finds it, as the first stage does.
    """
    check_whole("rows", rows, 1)
    for depth in chances:
        chain(depth)
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while waiting and len(found) < rows:
        negative, path = heapq.heappop(waiting)
        found[path] = -negative
        for rank, chance in enumerate(chances[len(path)] if len(path) < len(chances) else ()):
            heapq.heappush(waiting, (negative * chance, (*path, rank)))
    del found[()]  # the certain token
    return found


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


def paying_rows(path_chances: Iterable[float], row_cost: float, draft_cost: float) -> int:
    """The number of rows, with the certain token's, at which `speedup` is highest.

    Rows enter by falling path chance q while q exceeds the row's cost in tokens: `row_cost·S`, S the speed-up without
    the row, since `(E + q)/(T + c) > E/T` if and only if `q > c·E/T`. A threshold of `row_cost` alone is that of S = 1.
    """
    entered: list[float] = []
    for chance in sorted(path_chances, reverse=True):
        check_share("path_chances", chance)
        if chance <= row_cost * speedup(entered, row_cost, draft_cost):
            break
        entered.append(chance)
    return 1 + len(entered)


def expected_first_boundary(shares: Sequence[float], rows: int) -> float:
    """E[J] with boundary 0, the stage times that a token costs on average; `shares` are those of J = 0, 1, …, N.

    A token that boundary 0 names enters in the pass of the token before it (J = 0), one stage time before boundary 1
    could name it. At most `rows` tokens of one path enter in one pass, the next one in the next pass (J = 1). Let
    boundary 0 be right with chance p0 behind every token. On average M = 1 + p0 + … + p0^(rows − 1) tokens enter
    together, and with chance p0^rows it names one more. So `E[J] = Σ j·share(j) + p0^rows / M`.

    `Stats.first_boundary`, measured rates and `staged.expected_first_boundary` count boundary 0 with boundary 1. That
    is this formula for one row a pass, p0 more than for rows without bound. With one stage, E[J] is 1 / M.
    """
    if len(shares) < 2:
        raise ValueError(f"shares={shares!r}: give one for boundary 0, one for each other boundary, one for never")
    check_shares(shares)
    check_whole("rows", rows, 1)
    *together, one_more = (shares[0] ** row for row in range(rows + 1))
    return math.fsum(j * share for j, share in enumerate(shares)) + one_more / math.fsum(together)


def speedup_bound(shares: Sequence[float], rows: int) -> float:
    """N / E[J] with boundary 0; up to N·rows."""
    return (len(shares) - 1) / expected_first_boundary(shares, rows)


def draft_model_token_time(
    stage_time: float, stages: int, draft_time: float, chance: float, rows: int, waits_for: int = 0
) -> float:
    """Time of a token in steady state if a draft model on its own device drafts on while N stages verify.

    s is a stage's time for a pass of the rows it carries, with its hop; T = N·s (one stage: d·t and the head). D is the
    draft model's time of a token, its message included; a = `chance`. At time 0 a token becomes certain that the draft
    model had wrong. From there it drafts a chain: draft i is there at i·D. The certain token's pass waits for g =
    `waits_for` drafts. Each later pass takes what is there, at most `rows`, once stage 1 is free. If X drafts are
    right, the next token that it had wrong is certain T after draft X entered (X = 0: after the certain token did):

    - D ≥ s, the draft model limits: draft X enters at X·D. E[X] = a/(1 − a), so a token takes `a·D + (1 − a)·T`.
    - D < s, the stages limit: a pass takes n = s/D drafts, so draft X > g enters at `g·D + s·⌈(X − g)/n⌉`.

    With s' = max(s, D) and n = min(s'/D, rows), both are `(1 − a)·(T + g·D + s'·a^g·Q)`. Q is the sum of a^(⌊m·n⌋ + 1)
    over m = 0, 1, …; for a whole n it is a/(1 − aⁿ). Waiting for draft g saves time if `s'·a^(g − 1)·(1 − a)·Q > D`.

    Raises a ValueError for D > T as well: no draft would be in time.
    """
    check_number("stage_time", stage_time)
    check_whole("stages", stages, 1)
    check_number("draft_time", draft_time)
    check_share("chance", chance)
    check_whole("waits_for", waits_for, 0)
    check_whole("rows", rows, waits_for + 1)
    if draft_time > stages * stage_time:
        raise ValueError(f"draft_time={draft_time!r}: give at most the stages' {stages * stage_time:g}")
    interval = max(stage_time, draft_time)
    drafts = Fraction(min(interval / draft_time, rows) if draft_time else rows).limit_denominator(1000)
    if chance == 1:
        return interval / float(drafts)
    once = math.fsum(chance ** (math.floor(m * drafts) + 1) for m in range(drafts.denominator))
    passes = chance**waits_for * once / (1 - chance**drafts.numerator)  # Q's terms recur, times a power of the chance
    return (1 - chance) * (stages * stage_time + waits_for * draft_time + interval * passes)
