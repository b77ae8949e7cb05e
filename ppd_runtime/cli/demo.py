"""`ppd demo`: see pipelined decoding work, in half a minute."""

from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import print_stream, show_progress
from ppd_runtime.imports import quick_imports

if TYPE_CHECKING:
    from ppd_runtime.measure.against_ordinary import Comparison

_USUAL_MATCH_RATE = 0.8  # of the embedded model on its own prompts, at any k, where nothing else runs
_PROMPT = "def read_lines(path):"
_TIMED_PROMPTS = (_PROMPT, "class Reader:", "    def __init__(self, name, value=None):")


def demo(
    k: Annotated[int, typer.Option(help="Early candidates for each token.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens for each text.")] = 96,
) -> None:
    """Stream a completion from the embedded model, then time pipelined beside ordinary decoding."""
    with one_line_errors():
        with quick_imports():
            from ppd_runtime import OrdinaryDecoding, PPDRuntime
            from ppd_runtime.config import SamplingParams
            from ppd_runtime.launching import available_cores
            from ppd_runtime.measure.against_ordinary import compare

        SamplingParams(max_new_tokens)  # refuses what cannot work before anything starts
        cores = available_cores()
        with PPDRuntime(k=k, progress=show_progress) as runtime:
            print_stream(runtime.stream(_PROMPT, max_new_tokens=max_new_tokens), _PROMPT)
        timed_k = max(1, min(k, cores - 1))
        if timed_k < k:
            print(f"\nTimed with k={timed_k}: {cores} CPU cores hold a main process and {timed_k} of {k} subs.")
        with PPDRuntime(k=timed_k, progress=show_progress) as runtime, OrdinaryDecoding() as ordinary:
            show_progress("timing both, in turn")
            comparison = compare(runtime, ordinary, _TIMED_PROMPTS, max_new_tokens)
        show_progress("")
        _print_summary(comparison, timed_k)


def _print_summary(comparison: "Comparison", k: int) -> None:
    from rich.console import Console
    from rich.table import Table

    saving = comparison.realised_saving
    table = Table(title=f"Pipelined beside ordinary decoding, k={k}", show_header=False)
    rows = [
        ("tokens", str(comparison.new_tokens)),
        ("hits, misses", f"{comparison.hits}, {comparison.misses}"),
        ("match rate", f"{comparison.match_rate:.3f}"),
        ("ordinary decoding, time per token", f"{comparison.ordinary_time_per_token_s * 1000:.2f} ms"),
        ("PPD, time per token", f"{comparison.ppd_time_per_token_s * 1000:.2f} ms"),
        ("ratio of the two, measured", f"{comparison.ratio:.3f}"),
        ("ratio that Theorem 4.1 predicts", f"{comparison.predicted_ratio:.3f}"),
        ("realised saving", "-" if saving is None else f"{saving:.0%}"),
        ("tokens identical", "yes, all of them" if comparison.identical else "NO"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if comparison.match_rate < _USUAL_MATCH_RATE:
        print("The match rate is low: right guesses that come too late count as misses. Is the machine busy?")
