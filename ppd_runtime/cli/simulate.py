"""`ppd simulate`: the machines of either layout on virtual clocks, beside what its formulas predict."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.cli.simulated_stages import StagedRuns, print_stages, simulate_stages
from ppd_runtime.cli.stages import USUAL_LAYERS, Layers, refuse_beside_stages, refuse_without_stages
from ppd_runtime.config import USUAL_K

if TYPE_CHECKING:
    from ppd_runtime.calibration.simulate import Prediction, Summary


@dataclass(frozen=True)
class PaperOptions:
    """Options of the paper's layout."""

    exit_layer: int = 20
    """Predict early after this layer."""
    workers: int | None = None
    """Sub-processes, at most k; default: k."""
    match_rate: float = 0.6837
    """How often a candidate is right."""
    width: float = 1.0
    """With fewer workers than k: a pass over a worker's candidates, in passes over one."""


@dataclass(frozen=True)
class StagesOptions:
    """Options of the staged layout."""

    cuts: str | None = None
    """With --stages: their borders, such as 3,6,9; default: as even as can be."""
    first_boundary: str | None = None
    """With --stages: how often boundary 1, 2, …, or none is the first to name the right token: .8,.1,.05,.05."""
    match_rates: Path | None = None
    """With --stages: take that from this file, which `ppd match-rate --out` wrote."""
    rows: int = 1
    """With --stages: tokens of a pass, at the most."""
    row_cost: float = 0.0
    """With --stages: what each further token adds to a pass; 0.05: 5 % of one token's."""


@dataclass(frozen=True)
class Disturbances:
    """What makes times differ from each other."""

    jitter: float = 0.0
    """Deviation of the random factor on each layer's time; 0.1: 10 %."""
    slow: tuple[str, ...] = ()
    """RANK:FACTOR slows a process, 0 the main one, which is the last stage; may be given again."""
    slow_link: tuple[str, ...] = ()
    """RANK:FACTOR slows messages to and from a process; may be given again."""

    def factors(self) -> Settings:
        """As the settings of a simulation have them; ValueError for what has another form."""
        from ppd_runtime.cost_model.tradeoff import parse_factors

        slow, links = parse_factors("--slow", self.slow), parse_factors("--slow-link", self.slow_link)
        return {"jitter": self.jitter, "slow": slow, "slow_links": links}


@takes(
    papers=options.group(PaperOptions, given_only=True),
    staged=options.group(StagesOptions, given_only=True),
    times=options.group(options.LayerTimes, layer_ms=1.0, head_ms=0.0, exit_head_ms=0.0, hop_ms=0.0),
    disturbances=options.group(Disturbances, make=Disturbances),
)
def simulate(
    layers: Layers = None,
    k: Annotated[int, typer.Option(help="Early candidates for each token; with --stages, at each boundary.")] = USUAL_K,
    *,
    papers: Settings,
    stages: Annotated[int | None, typer.Option(help="The staged layout with so many stages instead.")] = None,
    staged: Settings,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    times: Settings,
    disturbances: Disturbances,
    run_ahead: Annotated[
        bool, typer.Option(help="With k=1 and the exit at half depth, go on without exit states, as the runtime does.")
    ] = True,
    runs: Annotated[int, typer.Option(help="Generations to simulate.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    as_json: options.AsJson = False,
    out: options.Out = None,
) -> None:
    """Simulate generations whose candidates are right at random, and set the mean beside the formulas' prediction.

    That is Theorem 4.1's for Algorithm 2, whose hits wait for two hops, also where the simulated sub-process runs
    ahead.

    --stages simulates the staged layout beside its own formulas, which take every candidate to enter at once. Its
    tokens are first named at a boundary drawn by --first-boundary or by the shares in the file of --match-rates.
    """
    with one_line_errors(simulate):
        check_outputs(out)
        factors = disturbances.factors()
        if stages is not None:
            refuse_beside_stages(str(stages), **papers, no_run_ahead=None if run_ahead else "")
            row_cost = staged.pop("row_cost", StagesOptions.row_cost)
            chosen = asdict(StagesOptions()) | staged
            del chosen["row_cost"]
            asked = StagedRuns(stages=stages, layers=layers, k=k, tokens=tokens, runs=runs, seed=seed, **chosen)
            found = simulate_stages(asked, (*times.values(), row_cost), factors)
            give_json(found.as_dict(), as_json, out)
            if not as_json:
                print_stages(found)
            return
        refuse_without_stages(**staged)
        num_layers = USUAL_LAYERS if layers is None else layers
        asked_papers = {"num_layers": num_layers, "k": k, "num_new_tokens": tokens, "run_ahead": run_ahead, **factors}
        _simulate_paper(PaperOptions(**papers), asked_papers, times, (runs, seed), as_json, out)


def _simulate_paper(
    papers: PaperOptions,
    asked: Settings,
    times: Settings,
    runs_and_seed: tuple[int, int],
    as_json: bool,
    out: Path | None,
) -> None:
    from ppd_runtime.calibration.simulate import Setting, predict, simulate_runs, summarise
    from ppd_runtime.cost_model.theory import Times

    runs, seed = runs_and_seed
    layer, head, exit_head, hop = times.values()
    of_passes = Times(layer, head, exit_head, hop, papers.width)
    setting = Setting(exit_layer=papers.exit_layer, workers=papers.workers, times=of_passes, **asked)
    predicted = predict(setting, papers.match_rate)
    simulated = summarise(setting, simulate_runs(setting, papers.match_rate, runs, seed))
    inputs = asdict(setting) | {"match_rate": papers.match_rate, "runs": runs, "seed": seed}
    give_json(inputs | {"predicted": asdict(predicted), "simulated": asdict(simulated)}, as_json, out)
    if not as_json:
        _print_table(predicted, simulated, runs)


def _print_table(predicted: "Prediction", simulated: "Summary", runs: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mean of a generation", title=f"Theorem 4.1 beside {runs} simulated generations")
    table.add_column("predicted", justify="right")
    table.add_column("simulated", justify="right")
    error = simulated.time_per_token_error
    spread = "" if error is None else f" ± {error:.3f}"
    rows = [
        ("hits", f"{predicted.hits:.1f}", f"{simulated.hits:.1f}"),
        ("misses", f"{predicted.misses:.1f}", f"{simulated.misses:.1f}"),
        ("main process, layer passes", f"{predicted.main_layer_passes:.1f}", f"{simulated.main_layer_passes:.1f}"),
        ("all processes, layer passes", f"{predicted.layer_passes:.1f}", f"{simulated.layer_passes:.1f}"),
        ("  to keep sub-processes' caches coherent", "-", f"{simulated.coherence_layer_passes:.1f}"),
        ("  for entries that came too late", "-", f"{simulated.main_recomputed_layer_passes:.1f}"),
        ("waiting for sub-processes, ms per token", "-", f"{simulated.stall_time_per_token:.3f}"),
        ("latency, ms per token", f"{predicted.time_per_token:.3f}", f"{simulated.time_per_token:.3f}{spread}"),
        ("share of ordinary decoding's latency", f"{predicted.ratio:.3f}", f"{simulated.ratio:.3f}"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
