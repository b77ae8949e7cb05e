"""A plan for devices that are not here: formulas over given times and measured match rates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from ppd_runtime.cost_model.devices import Parts, Predicted, rank
from ppd_runtime.cost_model.match_rates import MatchRates, parse_list, read_match_rates, select
from ppd_runtime.settings.config import ALL_FORMATS
from ppd_runtime.tune.verdict import Candidate, Plan, Verdict, verdict

_HEADS = ("", "devices", "ms/token", "speed-up", "allowed", "compute")
_MOST_ROWS = 16
_FREE_ROWS = (
    "Further tokens of a pass count as free. On GPUs and in half precision the runtime runs each as a pass of its own: "
    "give --row-cost 1 for those."
)


@dataclass(frozen=True)
class Given:
    """What is known of devices that are not here, and of the model.

    Raises:
        ValueError: naming the value and the way out.
    """

    devices: int | None = None
    """Predict for so many devices that are not here, by formulas, instead of running layouts."""
    hop_ms: float | None = None
    """With --devices: time of a message between two of them."""
    layer_ms: float | None = None
    """With --devices: time of a layer on one of them."""
    head_ms: float | None = None
    """With --devices: time of the final head."""
    exit_head_ms: float | None = None
    """With --devices: time of an exit head."""
    row_cost: float | None = None
    """With --devices: what a further token adds to a pass, as a share of the first one's time."""
    match_rates: Path | None = None
    """With --devices: the file that `ppd match-rate --out` wrote."""
    layers: int | None = None
    """With --devices: decoder layers, where the match rates' file lacks them."""
    k: str | None = None
    """With --devices: candidates to plan with, such as 1,3; default: all that the file has."""
    all_reduce_ms: float | None = None
    """With --devices: rank tensor parallelism with all-reduces of this time, two for each layer."""

    def __post_init__(self) -> None:
        if self.devices is None:
            for name, value in asdict(self).items():
                if value is not None:
                    raise ValueError(f"{name}={value}: is for devices that are not here, give --devices as well")
            return
        for option in ("match_rates", "layer_ms", "hop_ms"):
            if getattr(self, option) is None:
                raise ValueError(f"devices={self.devices}: needs --{option.replace('_', '-')} as well, give it too")
        assert self.parts  # refuses what cannot be

    @cached_property
    def ks(self) -> list[int] | None:
        """The candidates as numbers."""
        return None if self.k is None else parse_list("--k", self.k, int)

    @cached_property
    def parts(self) -> Parts:
        """The times."""
        names = [entry.name for entry in fields(Parts)]
        return Parts(**{name: value for name in names if (value := getattr(self, name)) is not None})


def plan_devices(given: Given, model: str, weights: str | None) -> Plan:
    """Rank what fits the devices; `weights` is the format that was asked for, None whatever the file's rates have.

    Raises:
        ValueError: for given values that cannot be.
    """
    assert given.devices and given.match_rates
    rates = read_match_rates(given.match_rates)
    if None not in (rates.weights, weights) and rates.weights != weights:
        told = f"was measured with weights in {rates.weights}, and the model has them in {weights}"
        raise ValueError(f"{given.match_rates} {told}: give figures that were measured alike")
    devices, parts, num_layers = given.devices, given.parts, rates.layers(given.layers)
    rates, cautions = _chosen(rates, num_layers, given.ks)
    if given.row_cost is None and any(len(shares) <= devices for shares in rates.first_boundary.values()):
        cautions = (*cautions, _FREE_ROWS)
    predicted, ordinary_ms = rank(num_layers, rates, parts, devices, given.all_reduce_ms), parts.ordinary_ms(num_layers)
    found = {
        "model": model,
        "num_layers": num_layers,
        "weights": rates.weights,
        "devices": devices,
        "parts": asdict(parts),
        "match_rates_source": rates.source,
        **rates.as_dict(),
        "ordinary_ms_per_token": ordinary_ms,
        "predicted": [asdict(row) for row in predicted],
    }
    few_bits = f", {rates.weights} weights" * (rates.weights in ALL_FORMATS)
    title = f"{model}{few_bits}, {num_layers} layers, at most {devices} devices: predicted for a token after the first"
    rows = [["ordinary decoding", 1, ordinary_ms, "1.00", "", "1.00"], *map(_cells, predicted[:_MOST_ROWS])]
    return Plan(title, found, _HEADS, rows, _verdict(predicted, devices, parts), cautions)


def _cells(row: Predicted) -> list[object]:
    ratios = (row.speedup, row.allowed_speedup, row.compute_per_token)
    return [row.name, row.devices, row.ms_per_token, *(f"{ratio:.2f}" for ratio in ratios)]


def _chosen(rates: MatchRates, num_layers: int, ks: Sequence[int] | None) -> tuple[MatchRates, tuple[str, ...]]:
    """The rates to plan with, and a caution for what was left out."""
    covered, left_out = rates.covered(num_layers)
    kept = {(exit_layer, k): rate for exit_layer, k, rate in select(covered.rates, None, ks)}
    boundaries = {(cuts, k): shares for (cuts, k), shares in covered.first_boundary.items() if not ks or k in ks}
    names = ", ".join(map(str, left_out))
    cautions = (f"Left out exit layers {names}: Theorem 4.1 needs at least half depth.",) if left_out else ()
    return replace(covered, rates=kept, first_boundary=boundaries), cautions


def _verdict(predicted: Sequence[Predicted], devices: int, parts: Parts) -> Verdict:
    own = [row for row in predicted if row.options]
    commands = [f"ppd generate {row.options}" for row in own]
    figures = [(row.name, row.ms_per_token, row.speedup, row.allowed_speedup) for row in own]
    candidates = [Candidate(*some, command=run) for some, run in zip(figures, commands, strict=True)]
    nothing = f"no setting with a match rate or first boundaries fits {devices} devices"
    found = verdict(candidates, nothing, f"a hop of {parts.hop_ms:g} ms with heads and rows")
    best = max((row.speedup for row in own), default=0.0)
    faster = [row for row in predicted if not row.options and row.speedup > best]
    if not faster:
        return found
    beside = min(faster, key=lambda row: row.devices)
    return replace(found, text=f"{found.text}; {beside.name} devices is faster: {beside.speedup:.2f} times")
