"""The staged layout and tensor parallelism, its rival for the same devices, as functions of plain numbers.

N stages stand in a row; an exit head at each of the N − 1 boundaries names k candidates for the next token. J is the
first boundary whose candidates hold the right one, N where none does; such a token costs J stage times. `shares` are
the probabilities of J: boundary 1, 2, …, N − 1, never. `cuts` are the layers behind which the boundaries lie, in
rising order.

A stage takes as long as the longest one, and a pass has room for every candidate. The last stage's final head is taken
to be no longer than what the longest stage has beside its layers.

Every function raises a ValueError for cuts that do not fit `num_layers`, shares outside [0, 1], of another number than
the stages or of another sum than 1, and negative times or rows.
"""

import math
from collections.abc import Sequence

from ppd_runtime.cost_model.theory import Times, ordinary_time
from ppd_runtime.settings.checks import check_cuts, check_number, check_share, check_whole, stage_layers

GPT_FAST_ALL_REDUCE_MS = (0.018, 0.029)
"""An all-reduce on 2 and on 8 A100 GPUs: gpt-fast's README has Llama-2-7B, 32 layers, at 104.9 tokens/s on one of them,
168.84 on 2, 254.02 on 4 and 328.43 on 8; what those times are beyond T/N, over its two all-reduces a layer."""
GPT_FAST_LAYER_MS = 0.298
"""A layer, heads included, on one of them: 1 / (104.9 · 32) seconds."""
_ROUNDING = 1e-6


def check_shares(shares: Sequence[float], stages: int | None = None) -> None:
    """Shares from 0 to 1 that sum to 1, two or more; as many as `stages` if that is given."""
    for share in shares:
        check_share("first_boundary", share)
    asked, wanted = ",".join(f"{share:g}" for share in shares), stages or max(2, len(shares))
    if len(shares) != wanted:
        boundaries = f"one for each of {wanted - 1} boundaries, and one for never"
        raise ValueError(f"first_boundary={asked!r}: {wanted} stages need {wanted} shares, {boundaries}")
    if abs(math.fsum(shares) - 1) > _ROUNDING:
        raise ValueError(
            f"first_boundary={asked!r}: the shares sum to {math.fsum(shares):g}, give shares that sum to 1"
        )


def expected_first_boundary(shares: Sequence[float]) -> float:
    """E[J], the stage times that a token costs on average: the sum of j times J's share j."""
    check_shares(shares)
    return math.fsum(boundary * share for boundary, share in enumerate(shares, start=1))


def speedup_bound(shares: Sequence[float]) -> float:
    """N / E[J]: the speed-up of even stages over ordinary decoding if only layers take time."""
    return len(shares) / expected_first_boundary(shares)


def stage_time(num_layers: int, cuts: Sequence[int], times: Times) -> float:
    """The longest stage's layers and the hop behind it: `max(layers)·τ·w + c`, in `times`' unit.

    w is `times.width`, a pass over a stage's rows in passes over one. With even stages and w = 1 it is `T/N + c`.
    """
    return max(stage_layers(num_layers, cuts)) * times.layer * times.width + times.hop


def token_time(num_layers: int, cuts: Sequence[int], shares: Sequence[float], times: Times) -> float:
    """Time of a token after the first: `(T/N + c)·E[J]` and a head, in `times`' unit.

    The head is the exit head σ if a boundary named the token, else the final one λ.
    """
    check_shares(shares, len(cuts) + 1)
    heads = (1 - shares[-1]) * times.exit_head + shares[-1] * times.head
    return stage_time(num_layers, cuts, times) * expected_first_boundary(shares) + heads


def expected_time(
    num_layers: int, cuts: Sequence[int], shares: Sequence[float], num_new_tokens: int, times: Times
) -> float:
    """Latency of a text in `times`' unit: all N stages and the final head for the first token, then `token_time`s.

    With two even stages and the defaults of `Times` it is Theorem 4.1's latency.
    """
    check_whole("num_new_tokens", num_new_tokens, 1)
    first = (len(cuts) + 1) * stage_time(num_layers, cuts, times) + times.head
    return first + (num_new_tokens - 1) * token_time(num_layers, cuts, shares, times)


def latency_ratio(
    num_layers: int, cuts: Sequence[int], shares: Sequence[float], num_new_tokens: int, times: Times | None = None
) -> float:
    """`expected_time` as a share of ordinary decoding's with its final heads; without `times` only layers count."""
    known = times or Times()
    staged = expected_time(num_layers, cuts, shares, num_new_tokens, known)
    return staged / ordinary_time(num_layers, num_new_tokens, known)


def dropped_rows(k: int, shares: Sequence[float]) -> float:
    """Rows a token that run and are dropped, if each boundary up to the first right one adds k, less the right one.

    That is `k·E[min(J, N − 1)]` less J's shares before never. Candidates of candidates come on top, and those that only
    boundaries behind the first right one name.
    """
    check_whole("k", k, 1)
    added = k * (expected_first_boundary(shares) - shares[-1])
    return added - (1 - shares[-1])


def compute_per_token(num_layers: int, cuts: Sequence[int], rows_per_token: float) -> float:
    """Full passes of d layers a token: its own row's, and those of `rows_per_token` dropped rows.

    A row enters when its parent has left a stage, and is dropped when its parent has left the last one: it runs at most
    the layers up to the last cut, which are counted. With N = 2, half depth and `dropped_rows` it is equation 6.
    """
    check_cuts(num_layers, cuts)
    check_number("rows_per_token", rows_per_token)
    return 1 + rows_per_token * cuts[-1] / num_layers


def tensor_parallel_time(num_layers: int, devices: int, times: Times, all_reduce: float) -> float:
    """Ordinary decoding's time of a token with each layer on several devices: `T/N + 2d·a + λ`, in `times`' unit.

    a is an all-reduce; two follow each layer's products. The head is not split, as in gpt-fast.
    """
    check_whole("num_layers", num_layers, 2)
    check_whole("devices", devices, 1)
    check_number("all_reduce", all_reduce)
    together = 2 * num_layers * all_reduce if devices > 1 else 0.0
    return num_layers * times.layer / devices + together + times.head
