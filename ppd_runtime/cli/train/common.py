"""What the training commands share: options, progress, and the report of a head or an adapter."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppd_runtime.host import available_cores
from ppd_runtime.settings.checks import check_threads

if TYPE_CHECKING:
    from rich.progress import Progress

    from ppd_runtime.training.head_comparison import HeadComparison
    from ppd_runtime.training.run import TrainingRun

Out = Annotated[Path, typer.Option(help="The new folder; it appears when everything is whole.")]
ExitLayer = Annotated[int | None, typer.Option(help="The layer to train for; default: half depth.")]
Data = Annotated[str, typer.Option(help='A .jsonl file of "text" or "prompt", a plain text, or "demo".')]
Seed = Annotated[int, typer.Option(help="Decides the order of the rows.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto: the frozen model's.")]
DiskGb = Annotated[float, typer.Option(help="Most gigabytes of hidden states on disk meanwhile.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: as PyTorch chooses, within what there is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]

_WAYS = {
    "greedy": "greedy",
    "shared_noise": "sampled, shared noise",
    "logits": "sampled, by logits",
}


def half_depth(model: str) -> int:
    """The layer in the middle, rounded up."""
    from ppd_runtime.models.checkpoint.description import describe

    return math.ceil(describe(model).num_layers / 2)


def set_threads(threads: int | None) -> None:
    """Have PyTorch use so many; None: as it chooses, within what there is. Raises ValueError, see `check_threads`."""
    import torch

    if threads is not None:
        check_threads("threads", threads)
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_cores()))


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None: what the user chose."""
    return {name: value for name, value in values.items() if value is not None}


def train_and_report(run: "TrainingRun", title: str, noun: str, show: Callable[[Any], None], *, as_json: bool) -> None:
    """Train, compare on held-out text, and print what came of it: one JSON object, or lines and what `show` prints."""
    report, training = _train_and_finish(run), run.training
    if as_json:
        print(json.dumps({"out": str(run.out), "steps": training.num_steps, **report.as_dict()}))
        return
    trained = f"{training.num_steps} steps, {training.num_tokens} tokens"
    say(f"{title} of {run.info.name}: {trained}; compared on {report.num_tokens} held-out tokens")
    show(report)
    say(f"the {noun} is in {run.out}")


def _train_and_finish(run: "TrainingRun") -> Any:
    """Take the steps that are left and compare on held-out text, with progress; what `run.finish` gives."""
    steps, rows = run.training.num_steps, run.num_held_out_rows
    try:
        with _progress() as progress:
            reading = progress.add_task("reading texts", total=None, visible=False)
            training = progress.add_task("training", total=steps)
            run.train(
                lambda step, loss: progress.update(
                    training, completed=step, description=f"step {step} of {steps}, loss {loss:.3f}"
                ),
                lambda done, of: progress.update(reading, completed=done, total=of, visible=True),
            )
            comparing = progress.add_task("comparing on held-out text", total=rows)
            return run.finish(lambda row: progress.update(comparing, completed=row))
    except KeyboardInterrupt:
        if run.unfinished.exists():
            sys.stderr.write(f"ppd: the training is kept in {run.unfinished}; the same command goes on\n")
        raise


def print_comparison(comparison: "HeadComparison") -> None:
    """A table of what an exit names before and after training, and the losses; at most 80 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("before → after", *(f"k={k}" for k in comparison.before.match_rates["greedy"])):
        table.add_column(heading, justify="left" if heading.startswith("before") else "right", no_wrap=True)
    for way, name in _WAYS.items():
        table.add_row(name, *_changes(comparison.before.match_rates[way], comparison.after.match_rates[way]))
    console.print(table, highlight=False)
    before, after = comparison.before, comparison.after
    console.print(
        f"loss {before.loss:.4f} → {after.loss:.4f} nats a token, full depth's is {comparison.final_loss:.4f}; "
        f"divergence from full depth {before.divergence:.4f} → {after.divergence:.4f}",
        highlight=False,
    )


def _changes(before: dict[int, float], after: dict[int, float]) -> list[str]:
    return [f"{rate:.4f} → {after[k]:.4f}" for k, rate in before.items()]


@contextlib.contextmanager
def _progress() -> Iterator["Progress"]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), "left")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def say(line: str) -> None:
    """Print a line as it is."""
    from rich.console import Console

    Console().print(line, highlight=False, markup=False)
