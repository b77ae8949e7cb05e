"""A plan for devices that are not here: formulas over given values, and over measured ones where none is given.

Only measuring needs the model and torch: they are imported when it comes to that.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ppd_runtime.checks import check_whole
from ppd_runtime.config import ALL_FORMATS
from ppd_runtime.cost_model.devices import Parts, Predicted, check_request, rank
from ppd_runtime.cost_model.match_rates import MatchRates, parse_list, read_match_rates, select
from ppd_runtime.tune.verdict import Candidate, Plan, Verdict, verdict

if TYPE_CHECKING:
    from ppd_runtime.launch.supervisor import Progress
    from ppd_runtime.tune.subject import Subject

_USUAL_KS = (1, 3, 5)
_HEADS = ("", "devices", "ms/token", "speed-up", "allowed", "compute")
_MOST_ROWS = 16
_PARTS = tuple(entry.name for entry in fields(Parts))


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
    """With --devices: time of a layer; default: measured here, and the heads' with it."""
    head_ms: float | None = None
    """With --devices: time of the final head."""
    exit_head_ms: float | None = None
    """With --devices: time of an exit head."""
    row_cost: float | None = None
    """With --devices: what a further token adds to a pass, as a share of the first one's time; default: measured
    where the layers are, else 0."""
    match_rates: Path | None = None
    """With --devices: what `ppd match-rate --out` wrote, instead of measuring rates."""
    layers: int | None = None
    """With --devices: decoder layers, where the match rates' file lacks them."""
    k: str | None = None
    """With --devices: candidates to plan with, such as 1,3; default: all that the file has, or 1,3,5."""
    all_reduce_ms: float | None = None
    """With --devices: rank tensor parallelism with all-reduces of this time, two for each layer."""

    def __post_init__(self) -> None:
        if self.devices is None:
            for name, value in asdict(self).items():
                if value is not None:
                    raise ValueError(f"{name}={value}: is for devices that are not here, give --devices as well")
            return
        check_request(self.devices, self.all_reduce_ms)
        for k in self.ks or ():
            check_whole("k", k, 1)
        if self.layers is not None:
            check_whole("layers", self.layers, 2)
        Parts(**{"layer_ms": 1.0, **self.known_parts})  # refuses what cannot be
        if self.hop_ms is None:
            told = f"devices={self.devices}: a message between devices that are not here cannot be timed"
            raise ValueError(f"{told}, give --hop-ms as well")

    @cached_property
    def ks(self) -> list[int] | None:
        """The candidates as numbers."""
        return None if self.k is None else parse_list("--k", self.k, int)

    @property
    def known_parts(self) -> dict[str, float]:
        """The given times of `Parts`."""
        return {name: value for name in _PARTS if (value := getattr(self, name)) is not None}

    @cached_property
    def rates(self) -> MatchRates | None:
        """The file's."""
        return None if self.match_rates is None else read_match_rates(self.match_rates)

    def check_weights(self, weights: str | None) -> None:
        """Raise ValueError if the file's rates have another format than the model, or than what was asked for."""
        known = self.rates.weights if self.rates else None
        if None not in (known, weights) and known != weights:
            told = f"was measured with weights in {known}, and the model has them in {weights}"
            raise ValueError(f"{self.match_rates} {told}: give figures that were measured alike")

    @property
    def measures(self) -> bool:
        """Whether the model is needed."""
        return self.rates is None or self.layer_ms is None


def plan_devices(given: Given, model: str, subject: "Subject | None", progress: "Progress" = lambda line: None) -> Plan:
    """Rank what fits; the `subject` is needed only for measuring.

    Raises:
        ValueError: for given values that cannot be.
    """
    num_layers = _num_layers(given, model, subject)
    devices, parts, rates = given.devices or 0, _parts(given, subject, progress), given.rates
    if rates is None:
        from ppd_runtime.tune.parts import measured_rates

        assert subject
        rates = measured_rates(subject, given.ks or _USUAL_KS, devices, progress)
    rates, cautions = _chosen(rates, num_layers, given.ks)
    progress("")
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


def _num_layers(given: Given, model: str, subject: "Subject | None") -> int:
    """The layers; ValueError if the file, the option and the model contradict each other."""
    if subject is None:
        assert given.rates
        return given.rates.layers(given.layers)
    info = subject.ordinary.info
    noted = given.rates.num_layers if given.rates else None
    for source, number in (("--layers", given.layers), (given.match_rates, noted)):
        if number not in (None, info.num_layers):
            told = f"{source} says {number} layers, but model {model!r} has {info.num_layers}"
            raise ValueError(f"{told}: give its own")
    given.check_weights(info.weights_name)
    return info.num_layers


def _parts(given: Given, subject: "Subject | None", progress: "Progress") -> Parts:
    if given.layer_ms is not None:
        return Parts(**given.known_parts)
    from ppd_runtime.tune.parts import measured_parts

    assert subject
    progress("measuring layers and heads")
    return replace(measured_parts(subject), **given.known_parts)


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
    candidates = [
        Candidate(row.name, row.ms_per_token, row.speedup, row.allowed_speedup, command=f"ppd generate {row.options}")
        for row in own
    ]
    nothing = f"no setting with a match rate or first boundaries fits {devices} devices"
    found = verdict(candidates, nothing, f"a hop of {parts.hop_ms:g} ms with heads and rows")
    best = max((row.speedup for row in own), default=0.0)
    faster = [row for row in predicted if not row.options and row.speedup > best]
    if not faster:
        return found
    beside = min(faster, key=lambda row: row.devices)
    return replace(found, text=f"{found.text}; {beside.name} devices is faster: {beside.speedup:.2f} times")
