"""What recording costs: ordinary decoding without its notes, with the ledger that is always on, and with a trace.

    python -m benchmarks.tracing --rounds 60 --json figures.json
    python -m benchmarks.tracing --compile

For comparison only, "no notes" puts a recorder in place that does nothing; the readings of the clock around what would
be noted, some tenths of a microsecond a token, stay. All three run on one core over one stage, in turn, in an order
that changes from round to round; the first round is dropped. Ratios are medians of the rounds' own. Times are for a
token after the first: putting a trace together behind the last is no token's time. Runs are short and many, but what is
recorded can still cost less than they tell apart; so a token's calls of the recorder are timed alone too.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run, spread
from ppd_runtime import OrdinaryDecoding
from ppd_runtime.config import DTYPES
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.results import GenerationResult
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Span

WAYS = SILENT, LEDGER, TRACE = "no notes", "ledger", "ledger and trace"
_AGAINST = ((SILENT, (LEDGER, TRACE)), (LEDGER, (TRACE,)))
"""What others are compared with, and which."""
_REPEATS = 101
_PROMPT = "def read_lines(path):"


class SilentRecorder(Recorder):
    """Notes nothing."""

    def pause(self) -> float:
        """Say when, and nothing else."""
        return time.perf_counter()

    resume = pause

    def note(self, *_: object) -> None:
        """Nothing."""


_RECORDERS = {SILENT: SilentRecorder, LEDGER: Recorder, TRACE: Recorder}


def measure(options: argparse.Namespace) -> Figures:
    """Run all three in turn; the figures by name, times by round."""
    for name, value in (("--tokens", options.tokens), ("--rounds", options.rounds)):
        if value < 2:
            raise ValueError(f"{name} {value}: give at least 2")
    settings = {"dtype": options.dtype, "device": "cpu", "compile": options.compile}
    with model_folder(options.model) as model, on_cores([max(os.sched_getaffinity(0))]):
        plain, traced = OrdinaryDecoding(model, **settings), OrdinaryDecoding(model, trace=True, **settings)
        traced.stage = plain.stage  # the same weights at the same places
        results = _results(options, plain, traced)
        spans = _spans(results[TRACE][-1])
        calls = {way: calls_us(recorder(), way == TRACE, spans, options.tokens) for way, recorder in _RECORDERS.items()}
    return {
        "model": options.model,
        "dtype": plain.dtype,
        "compiled": options.compile,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "ms_a_token": {way: [result.stats.time_per_token_s * 1000 for result in results[way]] for way in WAYS},
        "calls_us_a_token": calls,
        "spans_a_token": len(spans) / options.tokens,
        "identical": len({result.token_ids for of_way in results.values() for result in of_way}) == 1,
    }


def _results(
    options: argparse.Namespace, plain: OrdinaryDecoding, traced: OrdinaryDecoding
) -> dict[str, list[GenerationResult]]:
    recorders = {way: recorder() for way, recorder in _RECORDERS.items()}
    results: defaultdict[str, list[GenerationResult]] = defaultdict(list)
    for turn in range(options.rounds + 1):
        first = turn % len(WAYS)
        for way in (*WAYS[first:], *WAYS[:first]):
            plain.stage.recorder = recorders[way]
            generator = traced if way == TRACE else plain
            result = generator.generate(_PROMPT, max_new_tokens=options.tokens, ignore_eos=True)
            results[way] += [result] if turn else []
    return results


def calls_us(recorder: Recorder, traced: bool, spans: Sequence[Span], num_tokens: int) -> float:
    """Microseconds that a token's calls of the recorder take; the silent one's are the price of calling alone."""
    times = []
    for _ in range(_REPEATS):
        recorder.begin(traced)
        began = time.perf_counter()
        for span in spans:
            recorder.note(span.kind, span.began_ns / 1e9, span.ended_ns / 1e9, span.position, span.token)
        for _ in range(num_tokens):
            recorder.resume()
            recorder.pause()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / num_tokens * 1e6


def _spans(result: GenerationResult) -> tuple[Span, ...]:
    return result.trace.processes[0].spans if result.trace else ()


def table(figures: Figures) -> str:
    """A row for each way, in Markdown; medians with quartiles."""
    columns = ["model", "dtype", "compiled", "recorded", "ms a token", f"ratio to {SILENT}", f"ratio to the {LEDGER}"]
    columns += ["the recorder's calls alone, µs a token"]
    times = figures["ms_a_token"]
    rows = [
        [
            *(figures[name] for name in ("model", "dtype")),
            "yes" if figures["compiled"] else "no",
            way,
            spread(times[way]),
            *(spread(_ratios(times[way], times[base]), 4) if way in later else None for base, later in _AGAINST),
            figures["calls_us_a_token"][way],
            figures["spans_a_token"] if way == TRACE else None,
            figures["identical"],
        ]
        for way in WAYS
    ]
    return markdown([*columns, "spans kept a token", "tokens identical"], rows)


def _ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    return [time / other for time, other in zip(times, base, strict=True)]


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--dtype", choices=DTYPES, default="auto")
    options.add_argument("--tokens", type=positive, default=16, help="new tokens in each run, two at least")
    options.add_argument("--rounds", type=positive, default=60, help="of one run each way, two at least")
    options.add_argument("--compile", action="store_true", help="decode in compiled code")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
