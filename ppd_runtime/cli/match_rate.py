"""`ppd match-rate`: how often an early exit already holds the token that full depth gives."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs, give_json
from ppd_runtime.cost_model.match_rates import parse_list
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.checks import even_cuts
from ppd_runtime.settings.config import ALL_FORMATS, SHARED

if TYPE_CHECKING:
    from ppd_runtime.models.checkpoint.description import ModelInfo
    from ppd_runtime.models.trained.heads import HeadInfo
    from ppd_runtime.tune.match_rate_report import FirstBoundaries, MatchRateReport
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
    out: options.Out = None,
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
        from ppd_runtime.models.trained.heads import describe_head
        from ppd_runtime.tune.match_rate_report import measured_report
        from ppd_runtime.tune.match_rates import MatchRateMeter, trained_head_meter
        from ppd_runtime.tune.prompt_files import read_prompts

        check_outputs(out)
        texts = [prompt.text for prompt in read_prompts(prompts, limit)]
        info = describe(model, place.get("weights"))
        head = None if exit_head == SHARED else describe_head(exit_head, info)
        setting = _setting(info, head, exit_layers, k, SamplingParams(**sampling), stages, cuts or ())
        with OrdinaryDecoding(model, **place) as ordinary:
            meter = trained_head_meter(ordinary, setting, head) if head else MatchRateMeter(ordinary, setting)
            report = measured_report(meter, texts, lambda done, of: show_progress(f"prompt {done} of {of} done"))
        show_progress("")
        if report.skipped_prompts:
            skipped = f"{report.skipped_prompts} of {len(texts)} prompts"
            sys.stderr.write(f"ppd: skipped {skipped}: too long for the model's positions\n")
        give_json(report.as_dict(), as_json, out)
        if not as_json:
            _print_tables(report)


def _setting(
    info: "ModelInfo",
    head: "HeadInfo | None",
    exit_layers: str | None,
    k: str,
    sampling: SamplingParams,
    stages: str | None,
    cuts: Sequence[str],
) -> "MatchRateSetting":
    from ppd_runtime.tune.match_rates import MatchRateSetting

    even = [] if stages is None else [even_cuts(info.num_layers, n) for n in parse_list("--stages", stages, int)]
    all_cuts = (*even, *(tuple(parse_list("--cuts", text, int)) for text in cuts))
    if exit_layers is None and head is not None:
        layers = [head.exit_layer]
    elif exit_layers in (None, "all"):
        layers = list(range(1, info.num_layers))
    else:
        layers = parse_list("--exit-layers", str(exit_layers), int)
    ks = tuple(parse_list("--k", k, int))
    setting = MatchRateSetting(info.num_layers, info.vocab_size, tuple(layers), ks, sampling, all_cuts)
    if head is not None:
        head.check_layers(setting.exit_layers)
    return setting


def _print_tables(report: "MatchRateReport") -> None:
    from ppd_runtime.tune.tables import plain_table

    setting, sampling, layers = report.setting, report.setting.sampling, report.setting.exit_layers
    kept = ("top-p", sampling.top_p, 1), ("top-k", sampling.top_k, 0)
    filters = "".join(f", {name} {value:g}" for name, value, every in kept if value not in (None, every))
    decoding = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}{filters}"
    compared = f"{report.runtime_rates.comparisons} tokens of {report.num_prompts} prompts compared"
    head = "" if report.exit_head == "shared" else f" exit head {report.exit_head[:20]},"
    few_bits = f", {report.weights} weights" * (report.weights in ALL_FORMATS)
    print(f"{report.model}{few_bits}, {setting.num_layers} layers,{head} {decoding}: {compared}")
    for ranking, rates in report.overall.items():
        rows = [[layer, *(rates.rate(layer, k) for k in rates.ks)] for layer in layers]
        print(f"\n{_RANKINGS[ranking]}\n", plain_table(["exit", *(f"k={k}" for k in rates.ks)], rows), sep="\n")
    ranges = report.by_position[setting.rankings[0]]
    rows = [[layer, *(rates.rate(layer, report.middle_k) for rates in ranges.values())] for layer in layers]
    heads = ["exit", *(f"{first}–{last}" for first, last in ranges)]
    print(f"\nby position in the output, k={report.middle_k}\n", plain_table(heads, rows), sep="\n")
    for ranking, boundaries in report.first_boundaries.items():
        for row in boundaries:
            title = f"{len(row.cuts) + 1} stages: the first boundary with the token,\n{_RANKINGS[ranking]}"
            print(f"\n{title}\n", plain_table(["boundary", *(f"k={k}" for k in row.ks)], _boundary_rows(row)), sep="\n")


def _boundary_rows(row: "FirstBoundaries") -> list[list[object]]:
    from ppd_runtime.cost_model.staged import expected_first_boundary, speedup_bound

    by_k = [row.shares(k) for k in row.ks]
    names = [*(f"layer {cut}" for cut in row.cuts), "none"]
    return [
        *([name, *shares] for name, shares in zip(names, zip(*by_k, strict=True), strict=True)),
        ["stages a token", *map(expected_first_boundary, by_k)],
        ["speed-up at most", *(f"{speedup_bound(shares):.2f}" for shares in by_k)],
    ]
