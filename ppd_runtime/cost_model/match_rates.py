"""Measured match rates: their file, and those of them that Theorem 4.1 covers."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ppd_runtime.cost_model.staged import check_shares
from ppd_runtime.settings.checks import check_choice, check_cuts, check_share, check_whole
from ppd_runtime.settings.config import ALL_FORMATS, FLOATS

T = TypeVar("T", int, float)
Rates = dict[tuple[int, int], float]
"""Match rate by (exit layer, k)."""
BoundaryShares = Mapping[tuple[tuple[int, ...], int], tuple[float, ...]]
"""Shares of the staged layout's first boundaries by (cuts, k); see `ppd_runtime.cost_model.staged`."""


@dataclass(frozen=True)
class MatchRates:
    """Measured match rates of one model."""

    source: str
    """Their origin, for messages."""
    rates: Rates
    num_layers: int | None = None
    """The model's layers; None if they are not noted."""
    first_boundary: BoundaryShares = field(default_factory=dict)
    """The staged layout's; empty if none were measured."""
    weights: str | None = None
    """The format of the model's weights, or floats; None if it is not noted."""

    def as_dict(self) -> dict[str, object]:
        """Rates and first boundaries as `read_match_rates` reads them."""
        by_layer: dict[str, dict[str, float]] = {}
        for (exit_layer, k), rate in sorted(self.rates.items()):
            by_layer.setdefault(str(exit_layer), {})[str(k)] = rate
        by_cuts: dict[tuple[int, ...], dict[str, list[float]]] = {}
        for (cuts, k), shares in sorted(self.first_boundary.items(), key=lambda row: (len(row[0][0]), row[0])):
            by_cuts.setdefault(cuts, {})[str(k)] = list(shares)
        boundaries = [{"cuts": list(cuts), "shares": shares} for cuts, shares in by_cuts.items()]
        return {"match_rates": by_layer, "first_boundary": boundaries}

    def layers(self, given: int | None, otherwise: int | None = None) -> int:
        """The model's layers: these rates' own, else those `given`, else `otherwise`.

        Raises:
            ValueError: two of them contradict each other, or there is none.
        """
        if given is not None and self.num_layers not in (None, given):
            raise ValueError(f"--layers {given}, but {self.source} is of {self.num_layers} layers: leave --layers out")
        known = next((n for n in (self.num_layers, given, otherwise) if n is not None), None)
        if known is None:
            raise ValueError(f"{self.source} does not say how many layers the model has: give --layers")
        return known

    def covered(self, num_layers: int) -> "tuple[MatchRates, list[int]]":
        """The rates that Theorem 4.1 covers, d/2 ≤ d̄ < d, and the exit layers left out.

        Raises:
            ValueError: if it covers none, or an exit layer is not before the last layer.
        """
        last = max(exit_layer for exit_layer, _ in self.rates)
        if last >= num_layers:
            raise ValueError(f"{self.source}: exit layer {last} is not before the last of {num_layers} layers")
        shallow = sorted({exit_layer for exit_layer, _ in self.rates if 2 * exit_layer < num_layers})
        kept = {setting: rate for setting, rate in self.rates.items() if setting[0] not in shallow}
        if not kept:
            raise ValueError(f"{self.source}: no exit layer at half depth or behind, which Theorem 4.1 needs")
        return replace(self, rates=kept), shallow


def select(rates: Rates, exit_layers: Sequence[int] | None, ks: Sequence[int] | None) -> list[tuple[int, int, float]]:
    """The measured (exit layer, k, match rate) of the exit layers and ks asked for; None asks for all.

    Raises:
        ValueError: for a setting that was not measured.
    """
    if exit_layers is None and ks is None:
        return [(exit_layer, k, rate) for (exit_layer, k), rate in sorted(rates.items())]
    exits = sorted({exit_layer for exit_layer, _ in rates}) if exit_layers is None else exit_layers
    counts = sorted({k for _, k in rates}) if ks is None else ks
    for setting in itertools.product(exits, counts):
        if setting not in rates:
            known = ", ".join(f"{exit_layer}/{k}" for exit_layer, k in sorted(rates))
            raise ValueError(f"no match rate for exit layer {setting[0]} with k={setting[1]}: choose among {known}")
    return [(exit_layer, k, rates[exit_layer, k]) for exit_layer, k in itertools.product(exits, counts)]


def read_match_rates(path: Path) -> MatchRates:
    """Measured rates from a JSON file `{"match_rates": {"<exit_layer>": {"<k>": rate}}, "num_layers": d}`.

    First boundaries are read from `"first_boundary": [{"cuts": [layer, …], "shares": {"<k>": [share, …]}}]`. They, the
    number of layers and the format of the model's `"weights"` may be missing; other keys are ignored.

    Raises:
        ValueError: for a file that cannot be read or has another form.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        by_exit, num_layers, weights = whole["match_rates"], whole.get("num_layers"), whole.get("weights")
        rates = {(int(exit_layer), int(k)): rate for exit_layer, by_k in by_exit.items() for k, rate in by_k.items()}
        boundaries = _boundary_shares(whole.get("first_boundary", []))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file of match rates") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wanted = '{"match_rates": {"<exit_layer>": {"<k>": rate}}}'
        raise ValueError(f"{path}: not a file of match rates; its form is {wanted}") from error
    if not rates:
        raise ValueError(f"{path}: holds no match rates; measure some first")
    for (exit_layer, k), rate in rates.items():
        check_share(f"{path}: match_rates[{exit_layer}][{k}]", rate)
        check_whole(f"{path}: k", k, 1)
    if num_layers is not None:
        check_whole(f"{path}: num_layers", num_layers, 2)
    if weights is not None:
        check_choice(f"{path}: weights", weights, (FLOATS, *ALL_FORMATS))
    _check_boundaries(path, num_layers, boundaries)
    return MatchRates(str(path), rates, num_layers, boundaries, weights)


def _check_boundaries(path: Path, num_layers: int | None, boundaries: BoundaryShares) -> None:
    try:
        for (cuts, k), shares in boundaries.items():
            check_whole("k", k, 1)
            for cut in cuts:
                check_whole("cuts", cut, 1)
            check_cuts(num_layers or max((1, *cuts)) + 1, cuts)
            check_shares(shares, len(cuts) + 1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _boundary_shares(rows: Sequence[Any]) -> BoundaryShares:
    return {(tuple(row["cuts"]), int(k)): tuple(shares) for row in rows for k, shares in row["shares"].items()}


def parse_list(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """Parse numbers between commas; ValueError names what is none."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{name}={text!r}: give {what} with commas between them") from None
