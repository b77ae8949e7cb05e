"""Theorem 4.1 of the paper with its limits, equations 3, 5 and 6, as functions of plain numbers.

d is `num_layers`, d̄ `exit_layer`, p `match_rate`, ℓ `num_new_tokens`. The unit of time and of compute is one layer's
pass, except where a function takes `Times`. Every function raises a ValueError for a rate outside [0, 1], an exit layer
outside d/2 … d − 1, less than one token or candidate, or a negative time.
"""

from dataclasses import dataclass, fields

from ppd_runtime.settings.checks import check_layers, check_number, check_share, check_whole


def expected_latency(num_layers: int, exit_layer: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected latency in layer times: `d·ℓ − (d − d̄)(ℓ − 1)·p` (Theorem 4.1, for d̄ ≥ d/2)."""
    check_layers(num_layers, exit_layer)
    _check_text(match_rate, num_new_tokens)
    saved = (num_layers - exit_layer) * (num_new_tokens - 1) * match_rate
    return num_layers * num_new_tokens - saved


def latency_ratio(num_layers: int, exit_layer: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected latency as a share of ordinary decoding's, `d·ℓ` (Theorem 4.1)."""
    ordinary = num_layers * num_new_tokens
    return expected_latency(num_layers, exit_layer, match_rate, num_new_tokens) / ordinary


def expected_compute(num_layers: int, exit_layer: int, k: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected layer passes of all processes: the latency's, and k(d − d̄) for every token (Theorem 4.1)."""
    check_whole("k", k, 1)
    latency = expected_latency(num_layers, exit_layer, match_rate, num_new_tokens)
    return latency + k * (num_layers - exit_layer) * num_new_tokens


def compute_per_token(num_layers: int, exit_layer: int, k: int, match_rate: float, num_new_tokens: int) -> float:
    """Expected compute of a token, in full passes of d layers; equation 6 is its limit at d̄ = d/2."""
    compute = expected_compute(num_layers, exit_layer, k, match_rate, num_new_tokens)
    return compute / (num_layers * num_new_tokens)


def compute_per_time(num_layers: int, exit_layer: int, k: int, match_rate: float, num_new_tokens: int) -> float:
    """Processes that compute, on average over the expected latency; equation 5 is its limit at d̄ = d/2."""
    compute = expected_compute(num_layers, exit_layer, k, match_rate, num_new_tokens)
    return compute / expected_latency(num_layers, exit_layer, match_rate, num_new_tokens)


def drafting_ratio(mean_accepted_length: float, draft_steps: float, draft_cost: float) -> float:
    """Expected latency of drafting and verifying in one process, as a share of ordinary decoding's: `(1 + s·c)/M`.

    M is the tokens that a verification gives, s the draft steps before it, c a step's time as a share of an ordinary
    step's. With s = (M − 1)/α it is the inverse of SWIFT's equation 6, `M·α / ((M − 1)·c + α)`.
    """
    check_number("mean_accepted_length", mean_accepted_length, 1)
    check_number("draft_steps", draft_steps)
    check_number("draft_cost", draft_cost)
    return (1 + draft_steps * draft_cost) / mean_accepted_length


def realised_saving(measured_ratio: float, predicted_ratio: float) -> float:
    """The share of the predicted saving that was measured: `(1 − measured) / (1 − predicted)`; below 1 falls short."""
    if predicted_ratio == 1:
        raise ValueError(f"predicted_ratio={predicted_ratio!r}: no saving was predicted, so there is no share of it")
    return (1 - measured_ratio) / (1 - predicted_ratio)


@dataclass(frozen=True)
class Times:
    """What the parts of a token cost, in one unit of time; the defaults are Theorem 4.1's."""

    layer: float = 1.0
    """τ: a layer's pass over one token."""
    head: float = 0.0
    """λ: the final norm and head."""
    exit_head: float = 0.0
    """σ: naming the candidates."""
    hop: float = 0.0
    """c: a message from one process to another."""
    width: float = 1.0
    """w: a sub-process' pass over its candidates, in passes over one; 1 if only memory traffic counts."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), least=1.0 if field.name == "width" else 0.0)


def miss_time(num_layers: int, times: Times) -> float:
    """Time from one token to the next without an early start, as in ordinary decoding: `d·τ + λ`, in `times`' unit."""
    check_whole("num_layers", num_layers, 2)
    return num_layers * times.layer + times.head


def hit_time(num_layers: int, exit_layer: int, times: Times) -> float:
    """Time from one token to the next after a hit, in `times`' unit: `d̄·τ + λ + max(0, 2c + σ + (w − 1)(d − d̄)τ − λ)`.

    The early start leaves the main process after the exit layer. It comes back two hops, an exit head and d − d̄ layers
    later. Until then the main process has its own d − d̄ layers and head to do.

    It is exact while hops and exit heads are short beside the layers, which means four things:
    - The winner's entries reach the other sub-processes before they need them: one worker, or c < (2d̄ − d)τ, or c ≤ σ
        if d̄ = d/2.
    - A sub-process is back in step one token after a miss: σ + (w − 1)(d − d̄)τ ≤ λ + (2d̄ − d)τ.
    - Every candidate is named before the token is: 2c + σ ≤ λ + (d − d̄)τ.
    - After that no early start takes longer than (d − d̄)τ to come.

    If one of them does not hold, a hit takes longer.
    """
    check_layers(num_layers, exit_layer)
    wider = (times.width - 1) * (num_layers - exit_layer) * times.layer
    wait = max(0.0, 2 * times.hop + times.exit_head + wider - times.head)
    return exit_layer * times.layer + times.head + wait


def expected_time(num_layers: int, exit_layer: int, match_rate: float, num_new_tokens: int, times: Times) -> float:
    """Expected latency with overheads, in `times`' unit: a miss' time for the first token, then hits and misses.

    With the defaults of `Times` it is Theorem 4.1's latency.
    """
    _check_text(match_rate, num_new_tokens)
    miss = miss_time(num_layers, times)
    hit = hit_time(num_layers, exit_layer, times)
    return miss + (num_new_tokens - 1) * (match_rate * hit + (1 - match_rate) * miss)


def ordinary_time(num_layers: int, num_new_tokens: int, times: Times) -> float:
    """Latency of ordinary decoding, `ℓ(d·τ + λ)`, in `times`' unit."""
    check_whole("num_new_tokens", num_new_tokens, 1)
    return num_new_tokens * miss_time(num_layers, times)


def _check_text(match_rate: float, num_new_tokens: int) -> None:
    check_share("match_rate", match_rate)
    check_whole("num_new_tokens", num_new_tokens, 1)
