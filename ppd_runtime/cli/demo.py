"""`ppd demo`: see pipelined decoding work, in less than a minute."""

from typing import TYPE_CHECKING

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import print_stream, show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.config import USUAL_K, RuntimeConfig
from ppd_runtime.imports import quick_imports
from ppd_runtime.measure.machine_load import busy_note
from ppd_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppd_runtime.measure.against_ordinary import Comparison

_STAGES = (2, 3, 4, 6)  # that the demo model's 12 layers are even in
_USUAL_MATCH_RATE = 0.8  # of the embedded model on its own prompts, at any k, where nothing else runs
_NO_DIFFERENCE = 0.005
_PROMPT = "def read_lines(path):"
_TIMED_PROMPTS = (_PROMPT, "class Reader:", "    def __init__(self, name, value=None):")


@takes(
    runtime=options.group(RuntimeConfig, ("k", "ray_address")),
    sampling=options.sampling("max_new_tokens", max_new_tokens=96),
)
def demo(runtime: Settings, sampling: Settings) -> None:
    """Stream a completion from the embedded model, then time both layouts beside ordinary decoding on this host."""
    with one_line_errors(demo):
        with quick_imports():
            from ppd_runtime import OrdinaryDecoding, PPDRuntime
            from ppd_runtime.host import available_cores
            from ppd_runtime.measure.against_ordinary import compare

        max_new_tokens = SamplingParams(**sampling).max_new_tokens  # refuses what cannot work before anything starts
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={max_new_tokens}: times are for tokens after the first, give at least 2")
        cores = available_cores()
        layouts, comparisons = _layouts(runtime.get("k") or USUAL_K, cores), {}
        with OrdinaryDecoding() as ordinary:
            for number, (name, layout) in enumerate(layouts.items()):
                with PPDRuntime(**{**runtime, **layout}, progress=show_progress) as timed:
                    if number == 0:
                        stages = len(timed.cuts) + 1
                        stream = timed.stream(_PROMPT, max_new_tokens=max_new_tokens, boundaries=True)
                        print_stream(stream, _PROMPT, stages)
                        print(f"\nTimed on {cores} CPU cores, each beside ordinary decoding: {', then '.join(layouts)}")
                    show_progress(f"timing {name} and ordinary decoding, in turn")
                    comparisons[name] = compare(timed, ordinary, _TIMED_PROMPTS, max_new_tokens, rounds=2)
        show_progress("")
        _print_all(comparisons)


def _layouts(k: int, cores: int) -> dict[str, dict[str, int]]:
    """Settings worth timing by name: a stage for each core, and as many candidates as there are spare cores."""
    stages = max((number for number in _STAGES if number <= cores), default=_STAGES[0])
    candidates = min(k, max(1, cores - 1))
    return {
        f"{stages} stages, k={k}": {"stages": stages, "k": k},
        f"the paper's layout, k={candidates}": {"k": candidates},
    }


def _print_all(comparisons: "Mapping[str, Comparison]") -> None:
    """The quickest layout's table, a line for each other one, and what to make of the times."""
    best = min(comparisons, key=lambda layout: comparisons[layout].ratio)
    _print_table(comparisons[best], best)
    print(f"Shown is the faster layout in these measurements, {best}.")
    for layout, comparison in comparisons.items():
        if layout != best:
            print(f"With {layout} PPD is {_outcome(comparison.ratio)} (ratio {comparison.ratio:.3f}).")
    for note in _notes(list(comparisons.values())):
        print(note)


def _outcome(ratio: float) -> str:
    """What a ratio of times means."""
    if abs(ratio - 1) < _NO_DIFFERENCE:
        return "as fast as ordinary decoding"
    return f"slower: a token takes {ratio - 1:.1%} longer" if ratio > 1 else f"{1 / ratio:.2f} times as fast"


def _print_table(comparison: "Comparison", layout: str) -> None:
    from rich.console import Console
    from rich.table import Table

    saving, theory = comparison.realised_saving, "E[J]/N" if comparison.first_boundary else "Theorem 4.1"
    table = Table(title=f"Pipelined beside ordinary decoding, {layout}", show_header=False)
    rows = [
        ("tokens", str(comparison.new_tokens)),
        *_named(comparison),
        ("ordinary decoding, time per token", f"{comparison.ordinary_time_per_token_s * 1000:.2f} ms"),
        ("PPD, time per token", f"{comparison.ppd_time_per_token_s * 1000:.2f} ms"),
        ("ratio of the two, measured", f"{comparison.ratio:.3f}"),
        (f"ratio that {theory} predicts", f"{comparison.predicted_ratio:.3f}"),
        ("realised saving", "-" if saving is None else "none" if saving <= 0 else f"{saving:.0%}"),
        ("tokens identical", "yes, all of them" if comparison.identical else "NO"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(f"PPD is {_outcome(comparison.ratio)}.")


def _named(comparison: "Comparison") -> list[tuple[str, str]]:
    """How often candidates were right."""
    if comparison.first_boundary:
        *boundaries, never = comparison.first_boundary
        counts = [(f"first named at boundary {number}", str(count)) for number, count in enumerate(boundaries, start=1)]
        return [*counts, ("that no boundary named", str(never))]
    hits = ("hits, misses", f"{comparison.hits}, {comparison.misses}")
    return [hits, ("match rate", f"{comparison.match_rate:.3f}")]


def _notes(comparisons: "Sequence[Comparison]") -> list[str]:
    """What a reader of the times should know."""
    shares = [comparison.cpu_share for comparison in comparisons if comparison.cpu_share is not None]
    busy = busy_note("Timing", min(shares, default=1.0))
    if busy:
        return [busy]
    low = any(comparison.match_rate < _USUAL_MATCH_RATE for comparison in comparisons)
    return ["The match rate is low: right guesses that come too late count as misses."] if low else []
