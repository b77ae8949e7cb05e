"""`ppd train`: the training recipes by name."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors

if TYPE_CHECKING:
    from rich.progress import Progress

    from ppd_runtime.measure.exit_heads import HeadComparison
    from ppd_runtime.training.exit_head_run import ExitHeadRun

train = typer.Typer(
    help="Train what makes early candidates better; the model itself stays as it is.", no_args_is_help=True
)
_WAYS = {
    "greedy": "greedy",
    "shared_noise": "sampled, shared noise",
    "logits": "sampled, by logits",
}


@train.callback()
def _recipes() -> None:
    """Keeps the recipe's name on the command line while there is only one."""


@train.command("exit-head")
def exit_head(
    out: Annotated[Path, typer.Option(help="The head's folder; it appears when the head is whole.")],
    model: options.Model = "demo",
    exit_layer: Annotated[int | None, typer.Option(help="The layer to train for; default: half depth.")] = None,
    data: Annotated[str, typer.Option(help='A .jsonl file of "text" or "prompt", a plain text, or "demo".')] = "demo",
    kind: Annotated[str, typer.Option(help="lm-head (the paper's), or affine: a map before the model's.")] = "lm-head",
    recipe: Annotated[str | None, typer.Option(help="paper (lm-head's default), or quick (affine's).")] = None,
    loss: Annotated[str | None, typer.Option(help="cross-entropy (paper), or distil (quick).")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: paper 2e-5, quick 2e-3.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: paper 128, quick 8.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens in a row; default: paper 2048, quick 512.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: paper 3, quick 1.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at the most; default: paper all, quick 200.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the order of the rows.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto: the frozen model's.")] = "auto",
    device: options.Device = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: as PyTorch chooses.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train an exit head for one layer of a frozen model and report what it gains on held-out text.

    A training that was stopped goes on with the same command. `ppd generate --exit-head` and `ppd match-rate
    --exit-head` use the folder.

    --recipe paper is Table 4 of the paper, for large models and data. --recipe quick learns full depth's own
    distribution in a few minutes on two cores, for small ones. Single options change either.
    """
    with one_line_errors():
        from ppd_runtime.training.exit_head import recipe_for
        from ppd_runtime.training.exit_head_run import ExitHeadRun

        _set_threads(threads)
        chosen = recipe_for(
            _half_depth(model) if exit_layer is None else exit_layer,
            kind,
            recipe,
            loss=loss,
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_length=max_length,
            epochs=epochs,
            max_steps=max_steps,
            seed=seed,
        )
        run = ExitHeadRun(model, data, chosen, out, dtype, device)
        comparison = _train(run)
        if as_json:
            print(json.dumps({"out": str(out), "steps": run.training.num_steps, **comparison.as_dict()}))
        else:
            _print_report(run, comparison)


def _half_depth(model: str) -> int:
    from ppd_runtime.models.loading import describe

    return math.ceil(describe(model).num_layers / 2)


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: must be at least 1")
        torch.set_num_threads(threads)


def _train(run: "ExitHeadRun") -> "HeadComparison":
    steps, rows = run.training.num_steps, run.num_held_out_rows
    try:
        with _progress() as progress:
            training = progress.add_task("training", total=steps)
            run.train(
                lambda step, loss: progress.update(
                    training, completed=step, description=f"step {step} of {steps}, loss {loss:.3f}"
                )
            )
            comparing = progress.add_task("comparing on held-out text", total=rows)
            return run.finish(lambda row: progress.update(comparing, completed=row))
    except KeyboardInterrupt:
        if run.checkpoint.path.exists():
            sys.stderr.write(f"ppd: the training is kept in {run.checkpoint.path}; the same command goes on\n")
        raise


@contextlib.contextmanager
def _progress() -> Iterator["Progress"]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), "left")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def _print_report(run: "ExitHeadRun", comparison: "HeadComparison") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, recipe = Console(), run.recipe
    head = f"{recipe.kind} for layer {recipe.exit_layer} of {run.info.num_layers} of {run.info.name}"
    trained = f"{run.training.num_steps} steps, {run.training.num_tokens} tokens"
    summary = f"{head}: {trained}; compared on {comparison.num_tokens} held-out tokens"
    console.print(summary, highlight=False, markup=False)
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
    console.print(f"the head is in {run.out}", highlight=False, markup=False)


def _changes(before: dict[int, float], after: dict[int, float]) -> list[str]:
    return [f"{rate:.4f} → {after[k]:.4f}" for k, rate in before.items()]
