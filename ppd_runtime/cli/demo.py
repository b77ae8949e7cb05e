"""`ppd demo`: see pipelined decoding work, in less than a minute."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import print_stream, show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.imports import quick_imports
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.settings.config import USUAL_K, RuntimeConfig
from ppd_runtime.tune.machine_load import busy_note

if TYPE_CHECKING:
    from ppd_runtime.tune.layouts import Layout, LayoutFigures

_STAGES = (2, 3, 4, 6)  # that the demo model's 12 layers are even in
_NO_DIFFERENCE = 0.005
_PROMPT = "def read_lines(path):"
_TIMED_PROMPTS = (_PROMPT, "class Reader:", "    def __init__(self, name, value=None):")
_SECONDS = 3.0


@takes(
    runtime=options.group(RuntimeConfig, ("k", "ray_address")),
    sampling=options.sampling("max_new_tokens", max_new_tokens=96),
)
def demo(runtime: Settings, sampling: Settings) -> None:
    """Stream a completion from the embedded model, then time both layouts beside ordinary decoding on this host."""
    with one_line_errors(demo):
        max_new_tokens = SamplingParams(**sampling).max_new_tokens  # refuses what cannot work before anything starts
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={max_new_tokens}: times are for tokens after the first, give at least 2")
        with quick_imports():
            from ppd_runtime import OrdinaryDecoding
            from ppd_runtime.host import available_cores
            from ppd_runtime.tune.layouts import LayoutFigures, measured, opened
            from ppd_runtime.tune.subject import Subject

        cores, rows = available_cores(), list[LayoutFigures]()
        layouts = _layouts(runtime.pop("k", None) or USUAL_K, cores)
        with OrdinaryDecoding() as ordinary:
            prompts = [ordinary.prompt_ids(prompt) for prompt in _TIMED_PROMPTS]
            subject = Subject(ordinary, prompts, SamplingParams(max_new_tokens, ignore_eos=True))
            for layout in layouts:
                with opened(layout, ordinary, **runtime, progress=show_progress) as way:
                    if not rows:
                        stream = way.stream(_PROMPT, max_new_tokens=max_new_tokens, boundaries=True)
                        print_stream(stream, _PROMPT, layout.processes)
                    show_progress(f"timing {layout.name} and ordinary decoding, in turn")
                    rows.append(measured(layout, way, subject, _SECONDS))
        show_progress("")
        print(f"\nTimed on {cores} CPU cores, in turn with ordinary decoding:")
        _print_all(rows)


def _layouts(k: int, cores: int) -> "list[Layout]":
    """Layouts worth timing: a stage for each core, and as many candidates as there are spare cores."""
    from ppd_runtime.tune.layouts import Layout

    stages = max((number for number in _STAGES if number <= cores), default=_STAGES[0])
    candidates = min(k, max(1, cores - 1))
    return [
        Layout(f"{stages} stages, k={k}", {"stages": stages, "k": k}, stages),
        Layout(f"paper's layout, k={candidates}", {"k": candidates}, candidates + 1),
    ]


def _print_all(rows: "Sequence[LayoutFigures]") -> None:
    """The figures of all layouts, and what to make of the times."""
    from ppd_runtime.tune.layouts import HEADS, layout_rows
    from ppd_runtime.tune.tables import plain_table

    print(plain_table(HEADS, layout_rows(rows)))
    for row in rows:
        print(f"{row.layout.name}: {_outcome(row.speedup)}.")
    shares = [row.cpu_share for row in rows if row.cpu_share is not None]
    if busy := busy_note("Timing", min(shares, default=1.0)):
        print(busy)


def _outcome(speedup: float) -> str:
    """What a speed-up means."""
    if abs(speedup - 1) < _NO_DIFFERENCE:
        return "as fast as ordinary decoding"
    return f"{speedup:.2f} times as fast" if speedup > 1 else f"slower, a token takes {1 / speedup - 1:.1%} longer"
