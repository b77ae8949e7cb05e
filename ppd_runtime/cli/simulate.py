"""`ppd simulate`: the pipeline's state machines on virtual clocks, beside what Theorem 4.1 predicts."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.outputs import check_outputs, give_json

if TYPE_CHECKING:
    from ppd_runtime.calibration.simulate import Prediction, Summary


def simulate(
    layers: Annotated[int, typer.Option(help="Decoder layers of the model.")] = 40,
    exit_layer: Annotated[int, typer.Option(help="Predict early after this layer.")] = 20,
    k: Annotated[int, typer.Option(help="Early candidates for each token.")] = 3,
    workers: Annotated[int | None, typer.Option(help="Sub-processes, at most k; default: k.")] = None,
    match_rate: Annotated[float, typer.Option(help="How often a candidate is right.")] = 0.6837,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    layer_ms: Annotated[float, typer.Option(help="Time of a layer.")] = 1.0,
    head_ms: Annotated[float, typer.Option(help="Time of the final head.")] = 0.0,
    exit_head_ms: Annotated[float, typer.Option(help="Time of an exit head.")] = 0.0,
    hop_ms: Annotated[float, typer.Option(help="Time of a message between two processes.")] = 0.0,
    width: Annotated[
        float, typer.Option(help="With fewer workers than k: a pass over a worker's candidates, in passes over one.")
    ] = 1.0,
    jitter: Annotated[
        float, typer.Option(help="Deviation of the random factor on each layer's time; 0.1: 10 %.")
    ] = 0.0,
    slow: Annotated[
        list[str] | None, typer.Option(help="RANK:FACTOR slows a process, 0 the main one; may be given again.")
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
    """Simulate generations whose candidates are right at random, and set the mean beside Theorem 4.1's prediction.

    The prediction is Algorithm 2's, whose hits wait for two hops, also where the simulated sub-process runs ahead.
    """
    with one_line_errors(simulate):
        from ppd_runtime.calibration.simulate import Setting, predict, simulate_runs, summarise
        from ppd_runtime.cost_model.theory import Times
        from ppd_runtime.cost_model.tradeoff import parse_factors

        check_outputs(out)
        setting = Setting(
            num_layers=layers,
            exit_layer=exit_layer,
            k=k,
            num_new_tokens=tokens,
            times=Times(layer_ms, head_ms, exit_head_ms, hop_ms, width),
            jitter=jitter,
            slow=parse_factors("--slow", slow or ()),
            slow_links=parse_factors("--slow-link", slow_link or ()),
            workers=workers,
            run_ahead=run_ahead,
        )
        predicted = predict(setting, match_rate)
        simulated = summarise(setting, simulate_runs(setting, match_rate, runs, seed))
        inputs = asdict(setting) | {"match_rate": match_rate, "runs": runs, "seed": seed}
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
