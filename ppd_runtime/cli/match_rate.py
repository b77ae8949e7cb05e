"""`ppd match-rate`: how often an early exit already holds the token that full depth gives."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_image, check_outputs, check_resume, give_json
from ppd_runtime.cli.progress import progress_bar
from ppd_runtime.config import ALL_FORMATS, SHARED
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from ppd_runtime.models.checkpoint.description import ModelInfo
    from ppd_runtime.models.trained.heads import HeadInfo
    from ppd_runtime.tune.first_boundaries import FirstBoundaries
    from ppd_runtime.tune.match_rate_report import MatchRateReport, Rates
    from ppd_runtime.tune.match_rate_run import MatchRateRun
    from ppd_runtime.tune.match_rates import MatchRateSetting

_RANKINGS = {"logits": "candidates by logits", "shared_noise": "candidates by logits and shared noise"}


@takes(sampling=options.sampling(*options.USUAL_SAMPLING), place=options.IN_PROCESS)
def match_rate(
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    exit_layers: Annotated[
        str | None,
        typer.Option(help='Layers to exit after, such as 10,20; default: the exit head\'s, or "all" but the last.'),
    ] = None,
    exit_head: options.ExitHead = "shared",
    k: Annotated[str, typer.Option(help="Numbers of candidates.")] = "1,3,5",
    stages: Annotated[
        str | None, typer.Option(help="Measure first boundaries for so many even stages, such as 2,4.")
    ] = None,
    cuts: Annotated[
        list[str] | None, typer.Option(help="And for stages that end after these layers: 3,6,9; may be given again.")
    ] = None,
    *,
    sampling: Settings,
    limit: options.Limit = None,
    as_json: options.AsJson = False,
    out: options.KeptOut = None,
    plot: Annotated[Path | None, typer.Option(help="Draw heatmaps into this image.")] = None,
    resume: options.Resume = False,
    place: Settings,
) -> None:
    """Measure how often a layer's k candidates hold the token that full depth generates.

    Every generated token is compared, the first and the last included. Every layer and every k come from one
    generation of each prompt and one more pass over its text. --stages and --cuts are the staged layout's: they add how
    often each boundary is the first whose candidates hold the token. `ppd tradeoff --match-rates` reads the --out file.
    """
    with one_line_errors(match_rate):
        from ppd_runtime.methods.ordinary import OrdinaryDecoding
        from ppd_runtime.models.checkpoint.description import describe
        from ppd_runtime.tune.match_rate_run import MatchRateRun
        from ppd_runtime.tune.match_rates import MatchRateMeter, trained_head_meter
        from ppd_runtime.tune.prompt_files import read_prompts

        check_resume(resume, out)
        check_outputs(out, plot)
        check_image(plot)
        texts = [prompt.text for prompt in read_prompts(prompts, limit)]
        params = SamplingParams(**sampling)
        info = describe(model, place.get("weights"))
        head = _trained_head(exit_head, info)
        setting = _setting(info, head, exit_layers, k, params, _cuts(info.num_layers, stages, cuts or ()))
        with OrdinaryDecoding(model, **place) as ordinary:
            meter = trained_head_meter(ordinary, setting, head) if head else MatchRateMeter(ordinary, setting)
            run = MatchRateRun(meter, texts, out, resume)
            _measure(run, as_json)
        report = run.report()
        _draw(report, plot)
        give_json(report.as_dict(), as_json, out)
        if run.partial:
            run.partial.discard()
        if not as_json:
            _print_tables(report)


def _trained_head(exit_head: str, info: "ModelInfo") -> "HeadInfo | None":
    from ppd_runtime.models.trained.heads import describe_head

    return None if exit_head == SHARED else describe_head(exit_head, info)


def _cuts(num_layers: int, stages: str | None, cuts: Sequence[str]) -> list[tuple[int, ...]]:
    from ppd_runtime.checks import even_cuts
    from ppd_runtime.cost_model.tradeoff import parse_list

    even = [] if stages is None else [even_cuts(num_layers, number) for number in parse_list("--stages", stages, int)]
    return [*even, *(tuple(parse_list("--cuts", text, int)) for text in cuts)]


def _setting(
    info: "ModelInfo",
    head: "HeadInfo | None",
    exit_layers: str | None,
    k: str,
    sampling: SamplingParams,
    cuts: Sequence[tuple[int, ...]],
) -> "MatchRateSetting":
    from ppd_runtime.cost_model.tradeoff import parse_list
    from ppd_runtime.tune.match_rates import MatchRateSetting

    if exit_layers is None and head is not None:
        layers = [head.exit_layer]
    elif exit_layers in (None, "all"):
        layers = list(range(1, info.num_layers))
    else:
        layers = parse_list("--exit-layers", str(exit_layers), int)
    ks = tuple(parse_list("--k", k, int))
    setting = MatchRateSetting(info.num_layers, info.vocab_size, tuple(layers), ks, sampling, tuple(cuts))
    if head is not None:
        head.check_layers(setting.exit_layers)
    return setting


def _measure(run: "MatchRateRun", as_json: bool) -> None:
    if run.skipped_prompts:
        skipped = f"{run.skipped_prompts} of {run.skipped_prompts + run.num_prompts} prompts"
        sys.stderr.write(f"ppd: skipped {skipped}: too long for the model's positions\n")
    try:
        with progress_bar(run.num_prompts, run.num_done) as on_progress:
            run.measure_rest(on_progress)
    except KeyboardInterrupt:
        if run.num_done and not as_json:
            _print_tables(run.report())
        if run.partial:
            sys.stderr.write(f"ppd: {run.num_done} prompts are kept in {run.partial.path}; --resume goes on\n")
        raise


def _draw(report: "MatchRateReport", plot: Path | None) -> None:
    if plot is not None:
        from ppd_runtime.tune.plots import draw_heatmaps

        draw_heatmaps(report, plot)


def _print_tables(report: "MatchRateReport") -> None:
    from rich.console import Console

    console, setting, sampling = Console(), report.setting, report.setting.sampling
    kept = ("top-p", sampling.top_p, 1), ("top-k", sampling.top_k, 0)
    filters = "".join(f", {name} {value:g}" for name, value, every in kept if value not in (None, every))
    decoding = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}{filters}"
    compared = f"{report.runtime_rates.comparisons} tokens of {report.num_prompts} prompts compared"
    cost = f"{report.cost_ratio:.2f} times the cost of generating them"
    head = "" if report.exit_head == "shared" else f" exit head {report.exit_head[:20]},"
    few_bits = f", {report.weights} weights" * (report.weights in ALL_FORMATS)
    summary = f"{report.model}{few_bits}, {setting.num_layers} layers,{head} {decoding}: {compared}, {cost}"
    console.print(summary, highlight=False, markup=False)
    for ranking, rates in report.overall.items():
        console.print(f"\n{_RANKINGS[ranking]}, with 95 % intervals", _rates_table(rates), highlight=False)
    console.print(f"\nby position in the output, k={report.middle_k}", _positions_table(report), highlight=False)
    for ranking, boundaries in report.first_boundaries.items():
        for row in boundaries:
            title = f"\n{len(row.cuts) + 1} stages: the first boundary with the token, {_RANKINGS[ranking]}"
            console.print(title, _boundaries_table(row), highlight=False)


def _rates_table(rates: "Rates") -> "Table":
    table = _table([f"k={k}" for k in rates.ks])
    for layer in rates.exit_layers:
        cells = [(rates.rate(layer, k), *rates.interval(layer, k)) for k in rates.ks]
        table.add_row(str(layer), *(f"{rate:.3f} ({low:.3f}–{high:.3f})" for rate, low, high in cells))
    return table


def _positions_table(report: "MatchRateReport") -> "Table":
    ranges = report.by_position[report.setting.rankings[0]]
    table = _table([f"{first}–{last}" for first, last in ranges])
    for layer in report.setting.exit_layers:
        table.add_row(str(layer), *(f"{rates.rate(layer, report.middle_k):.3f}" for rates in ranges.values()))
    return table


def _boundaries_table(row: "FirstBoundaries") -> "Table":
    from ppd_runtime.cost_model.staged import expected_first_boundary, speedup_bound

    table = _table([f"k={k}" for k in row.ks], first="boundary")
    by_k = [row.shares(k) for k in row.ks]
    for name, shares in zip([*(f"layer {cut}" for cut in row.cuts), "none"], zip(*by_k, strict=True), strict=True):
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    table.add_row("stages a token", *(f"{expected_first_boundary(shares):.3f}" for shares in by_k))
    table.add_row("speed-up at most", *(f"{speedup_bound(shares):.2f}" for shares in by_k))
    return table


def _table(headings: list[str], first: str = "exit") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in (first, *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    return table
