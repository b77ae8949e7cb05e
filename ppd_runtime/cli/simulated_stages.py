"""What `ppd simulate --stages` simulates and prints."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppd_runtime.cli.stages import staged_settings

if TYPE_CHECKING:
    from ppd_runtime.calibration.simulate_stages import StagedSetting, StagedSummary


@dataclass(frozen=True)
class StagedRuns:
    """Options of `ppd simulate` that the staged layout has, but for times and factors on them."""

    stages: int
    cuts: str | None
    first_boundary: str | None
    match_rates: Path | None
    layers: int | None
    k: int
    rows: int
    tokens: int
    runs: int
    seed: int


@dataclass(frozen=True)
class FoundStages:
    """A setting, what the formulas say of it, and what it came to."""

    asked: StagedRuns
    setting: "StagedSetting"
    shares: tuple[float, ...]
    predicted: "StagedSummary"
    simulated: "StagedSummary"

    def as_dict(self) -> dict[str, object]:
        """In JSON's values."""
        inputs = {"shares": self.shares, "runs": self.asked.runs, "seed": self.asked.seed}
        return (
            asdict(self.setting) | inputs | {name: asdict(getattr(self, name)) for name in ("predicted", "simulated")}
        )


def simulate_stages(asked: StagedRuns, times: tuple[float, ...], factors: dict[str, Any]) -> FoundStages:
    """Simulate; `times` are those of `StageTimes`, `factors` the setting's.

    Raises:
        ValueError: for what was given and cannot be, before anything runs.
    """
    from ppd_runtime.calibration.simulate_stages import (
        StagedSetting,
        predict_stages,
        simulate_staged_runs,
        summarise_staged,
    )
    from ppd_runtime.calibration.simulated_stages import StageTimes

    num_layers, cuts, shares = _known(asked)
    setting = StagedSetting(num_layers, cuts, asked.k, asked.rows, asked.tokens, StageTimes(*times), **factors)
    predicted = predict_stages(setting, shares)
    runs = simulate_staged_runs(setting, shares, asked.runs, asked.seed)
    return FoundStages(asked, setting, shares, predicted, summarise_staged(setting, runs))


def _known(asked: StagedRuns) -> tuple[int, tuple[int, ...], tuple[float, ...]]:
    """Layers, cuts and shares."""
    from ppd_runtime.cost_model.tradeoff import parse_list

    given = (asked.first_boundary, asked.match_rates, asked.layers, [asked.k])
    num_layers, settings = staged_settings([asked.stages], *given)
    if asked.cuts is None:
        if len(settings) > 1:
            known = " and ".join(",".join(map(str, cuts)) for cuts, _, _ in settings)
            raise ValueError(f"{asked.match_rates}: has {asked.stages} stages cut at {known}, give --cuts")
        return num_layers, settings[0][0], settings[0][2]
    cuts = tuple(parse_list("--cuts", asked.cuts, int))
    if len(cuts) != asked.stages - 1:
        borders = f"{asked.stages} stages have {asked.stages - 1} borders"
        raise ValueError(f"--cuts {asked.cuts} with --stages {asked.stages}: {borders}, change one of them")
    if asked.match_rates is None:
        return num_layers, cuts, settings[0][2]
    shares = next((shares for known, _, shares in settings if known == cuts), None)
    if shares is None:
        raise ValueError(f"--cuts {asked.cuts}: not in {asked.match_rates}, `ppd match-rate --cuts` measures them")
    return num_layers, cuts, shares


def print_stages(found: FoundStages) -> None:
    """Predicted beside simulated, as of the paper's layout."""
    from rich.console import Console
    from rich.table import Table

    setting, predicted, simulated = found.setting, found.predicted, found.simulated
    times, after = setting.times, f"after layer{'s' * (len(setting.cuts) > 1)} {', '.join(map(str, setting.cuts))}"
    layout = f"{setting.stages} stages cut {after}, k={setting.k}, rows={setting.rows}"
    title = f"{layout}: the formulas beside {found.asked.runs} simulated generations"
    further = f"a further row of a pass {times.row_cost:g} of the first"
    caption = f"a layer takes {times.layer:g} ms, a hop {times.hop:g} ms, {further}"
    table = Table("mean of a generation", title=title, caption=caption)
    table.add_column("predicted", justify="right")
    table.add_column("simulated", justify="right")
    error = simulated.time_per_token_error
    spread = "" if error is None else f" ± {error:.3f}"
    named = [f"tokens first named at boundary {boundary}" for boundary in range(1, setting.stages)]
    for name, *both in zip(
        [*named, "tokens that none named"], predicted.first_boundary, simulated.first_boundary, strict=True
    ):
        table.add_row(name, *(f"{count:.1f}" for count in both))
    rows = [
        ("rows a token, first stage", f"{predicted.rows_per_token:.2f}", f"{simulated.rows_per_token:.2f}"),
        ("latency, ms per token", f"{predicted.time_per_token:.3f}", f"{simulated.time_per_token:.3f}{spread}"),
        ("share of ordinary decoding's latency", f"{predicted.ratio:.3f}", f"{simulated.ratio:.3f}"),
        ("speed-up", f"{1 / predicted.ratio:.2f}", f"{1 / simulated.ratio:.2f}"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
