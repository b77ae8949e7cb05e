"""`ppd simulate`: the machines of either layout on virtual clocks, beside what its formulas predict."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.cli.simulated_stages import StagedRuns, print_stages, simulate_stages
from ppd_runtime.cli.stages import USUAL_LAYERS, refuse_beside_stages, refuse_without_stages

if TYPE_CHECKING:
    from ppd_runtime.calibration.simulate import Prediction, Summary

_EXIT_LAYER, _K, _MATCH_RATE = 20, 3, 0.6837


def simulate(
    layers: Annotated[
        int | None,
        typer.Option(
            help="Decoder layers of the model; default: what --match-rates says.", show_default=str(USUAL_LAYERS)
        ),
    ] = None,
    exit_layer: Annotated[
        int | None, typer.Option(help="Predict early after this layer.", show_default=str(_EXIT_LAYER))
    ] = None,
    k: Annotated[int, typer.Option(help="Early candidates for each token; with --stages, at each boundary.")] = _K,
    workers: Annotated[int | None, typer.Option(help="Sub-processes, at most k; default: k.")] = None,
    match_rate: Annotated[
        float | None, typer.Option(help="How often a candidate is right.", show_default=str(_MATCH_RATE))
    ] = None,
    stages: Annotated[int | None, typer.Option(help="The staged layout with so many stages instead.")] = None,
    cuts: Annotated[
        str | None, typer.Option(help="With --stages: their borders, such as 3,6,9; default: as even as can be.")
    ] = None,
    first_boundary: Annotated[
        str | None,
        typer.Option(
            help="With --stages: how often the first boundary to name the right token is no. 1, 2, …, and none of "
            "them: .8,.1,.05,.05."
        ),
    ] = None,
    match_rates: Annotated[
        Path | None, typer.Option(help="With --stages: take that from this file, which `ppd match-rate --out` wrote.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="With --stages: tokens of a pass, at the most.", show_default="1")
    ] = None,
    row_cost: Annotated[
        float | None,
        typer.Option(
            help="With --stages: what each further token adds to a pass; 0.05: 5 % of one token's.", show_default="0"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    layer_ms: Annotated[float, typer.Option(help="Time of a layer.")] = 1.0,
    head_ms: Annotated[float, typer.Option(help="Time of the final head.")] = 0.0,
    exit_head_ms: Annotated[float, typer.Option(help="Time of an exit head.")] = 0.0,
    hop_ms: Annotated[float, typer.Option(help="Time of a message between two processes.")] = 0.0,
    width: Annotated[
        float | None,
        typer.Option(
            help="With fewer workers than k: a pass over a worker's candidates, in passes over one.", show_default="1"
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Deviation of the random factor on each layer's time; 0.1: 10 %.")
    ] = 0.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(help="RANK:FACTOR slows a process, 0 the main one, which is the last stage; may be given again."),
    ] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option(help="RANK:FACTOR slows messages to and from a process; may be given again.")
    ] = None,
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
        from ppd_runtime.calibration.simulate import Setting, predict, simulate_runs, summarise
        from ppd_runtime.cost_model.theory import Times
        from ppd_runtime.cost_model.tradeoff import parse_factors

        check_outputs(out)
        factors: Settings = {
            "jitter": jitter,
            "slow": parse_factors("--slow", slow or ()),
            "slow_links": parse_factors("--slow-link", slow_link or ()),
        }
        if stages is not None:
            papers = {"exit_layer": exit_layer, "workers": workers, "match_rate": match_rate, "width": width}
            refuse_beside_stages(str(stages), **papers, no_run_ahead=None if run_ahead else "")
            times = (layer_ms, head_ms, exit_head_ms, hop_ms, row_cost or 0.0)
            asked = StagedRuns(
                stages, cuts, first_boundary, match_rates, layers, k, 1 if rows is None else rows, tokens, runs, seed
            )
            found = simulate_stages(asked, times, factors)
            give_json(found.as_dict(), as_json, out)
            if not as_json:
                print_stages(found)
            return
        staged = {"cuts": cuts, "first_boundary": first_boundary, "match_rates": match_rates}
        refuse_without_stages(**staged, rows=rows, row_cost=row_cost)
        setting = Setting(
            num_layers=USUAL_LAYERS if layers is None else layers,
            exit_layer=_EXIT_LAYER if exit_layer is None else exit_layer,
            k=k,
            num_new_tokens=tokens,
            times=Times(layer_ms, head_ms, exit_head_ms, hop_ms, 1.0 if width is None else width),
            **factors,
            workers=workers,
            run_ahead=run_ahead,
        )
        rate = _MATCH_RATE if match_rate is None else match_rate
        predicted = predict(setting, rate)
        simulated = summarise(setting, simulate_runs(setting, rate, runs, seed))
        inputs = asdict(setting) | {"match_rate": rate, "runs": runs, "seed": seed}
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
