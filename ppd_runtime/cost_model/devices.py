"""Layouts on devices that are not here: the formulas over the parts of a token, ranked by predicted time.

A device holds one process: the main process and k sub-processes of the paper's layout need k + 1, N stages need N.
Times are for a token after the first; every method shares the first token's pass over the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ppd_runtime.cost_model import staged, theory
from ppd_runtime.cost_model.match_rates import MatchRates
from ppd_runtime.cost_model.theory import Times
from ppd_runtime.settings.checks import check_number, check_share, check_whole, even_cuts, stage_layers


@dataclass(frozen=True)
class Parts:
    """Times of a token's parts on a device, in milliseconds; an omitted part costs nothing.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    layer_ms: float
    """A layer's pass over one token."""
    head_ms: float = 0.0
    """The final norm and head."""
    exit_head_ms: float = 0.0
    """Naming the candidates."""
    hop_ms: float = 0.0
    """A message from one device to another."""
    row_cost: float = 0.0
    """What a further token adds to a pass, as a share of the first one's time."""

    def __post_init__(self) -> None:
        for name in ("layer_ms", "head_ms", "exit_head_ms", "hop_ms"):
            check_number(name, getattr(self, name))
        if not self.layer_ms:
            raise ValueError("layer_ms=0: a plan needs layers that take time; give a number above 0")
        check_share("row_cost", self.row_cost)

    def ordinary_ms(self, num_layers: int) -> float:
        """Ordinary decoding's time for a token, on one device."""
        return num_layers * self.layer_ms + self.head_ms

    def times(self, rows: float = 1.0) -> Times:
        """These times in the formulas' form, for passes over `rows` tokens."""
        width = 1 + self.row_cost * max(rows - 1, 0.0)
        return Times(self.layer_ms, self.head_ms, self.exit_head_ms, self.hop_ms, width)


@dataclass(frozen=True)
class Predicted:
    """A way of decoding on several devices and what the formulas say of it."""

    name: str
    devices: int
    options: str
    """The options of `ppd generate` for it; empty for tensor parallelism, which this project lacks."""
    ms_per_token: float
    speedup: float
    """Ordinary decoding's time per token over this one's."""
    allowed_speedup: float
    """The speed-up if only layers take time: Theorem 4.1's for long texts, or N/E[J]."""
    compute_per_token: float
    """Full passes of all layers, by all devices; ordinary decoding's is 1."""


def rank(
    num_layers: int, rates: MatchRates, parts: Parts, devices: int, all_reduce_ms: float | None = None
) -> list[Predicted]:
    """Every setting of `rates` that fits the devices, the fastest first.

    Tensor parallelism is included if an all-reduce's time is given.

    Raises:
        ValueError: for rates or shares outside [0, 1], and layers that Theorem 4.1 or the stages do not cover.
    """
    check_whole("devices", devices, 2)
    rows = [
        paper(num_layers, exit_layer, k, rate, parts)
        for (exit_layer, k), rate in rates.rates.items()
        if k + 1 <= devices
    ]
    rows += [
        stages(num_layers, cuts, k, shares, parts)
        for (cuts, k), shares in rates.first_boundary.items()
        if len(shares) <= devices
    ]
    if all_reduce_ms is not None:
        rows += [tensor_parallelism(num_layers, n, parts, all_reduce_ms) for n in sorted({2, devices})]
    return sorted(rows, key=lambda row: (row.ms_per_token, row.devices, row.compute_per_token))


def paper(num_layers: int, exit_layer: int, k: int, match_rate: float, parts: Parts) -> Predicted:
    """The paper's layout with a sub-process for each candidate: Theorem 4.1 with heads and hops."""
    check_share("match_rate", match_rate)
    check_whole("k", k, 1)
    times, early = parts.times(), num_layers - exit_layer
    hit, miss = theory.hit_time(num_layers, exit_layer, times), theory.miss_time(num_layers, times)
    ms = match_rate * hit + (1 - match_rate) * miss
    return Predicted(
        name=f"k={k}, exit after layer {exit_layer}",
        devices=k + 1,
        options=f"--k {k} --exit-layer {exit_layer}",
        ms_per_token=ms,
        speedup=miss / ms,
        allowed_speedup=num_layers / (num_layers - early * match_rate),
        compute_per_token=1 + early * (k - match_rate) / num_layers,
    )


def stages(num_layers: int, cuts: Sequence[int], k: int, shares: Sequence[float], parts: Parts) -> Predicted:
    """The staged layout: E[J] stage times a token, in passes over as many rows as there are on average."""
    boundary, dropped = staged.expected_first_boundary(shares), staged.dropped_rows(k, shares)
    times = parts.times((1 + max(dropped, 0.0)) / boundary)
    ms = staged.token_time(num_layers, cuts, shares, times)
    longest = max(stage_layers(num_layers, cuts))
    even = tuple(cuts) == even_cuts(num_layers, len(shares))
    where = "" if even else f" cut after {', '.join(map(str, cuts))}"
    return Predicted(
        name=f"{len(shares)} stages{where}, k={k}",
        devices=len(shares),
        options=f"--cuts {','.join(map(str, cuts))} --k {k}",
        ms_per_token=ms,
        speedup=theory.miss_time(num_layers, parts.times()) / ms,
        allowed_speedup=num_layers / (longest * boundary),
        compute_per_token=staged.compute_per_token(num_layers, cuts, max(dropped, 0.0)),
    )


def tensor_parallelism(num_layers: int, devices: int, parts: Parts, all_reduce_ms: float) -> Predicted:
    """Ordinary decoding with each layer on all devices."""
    times = parts.times()
    ms = staged.tensor_parallel_time(num_layers, devices, times, all_reduce_ms)
    speedup = theory.miss_time(num_layers, times) / ms
    return Predicted(f"tensor parallelism on {devices}", devices, "", ms, speedup, float(devices), 1.0)
