"""`ppd train layerskip`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.options import Settings, group, takes
from ppd_runtime.cli.train import common

if TYPE_CHECKING:
    from ppd_runtime.training.layerskip_run import LayerSkipReport


@dataclass(frozen=True)
class RecipeOptions:
    """What may be told of the recipe; None is the paper's."""

    max_dropout: float | None = None
    """p_max: how often samples leave out the last layer; default: 0.1."""
    dropout_curriculum: str | None = None
    """S(t): constant, or exponential (from scratch the default)."""
    e_scale: float | None = None
    """The early exits' weight, 0 to 1; default: 0.2."""
    exit_curriculum: str | None = None
    """C(t, l), which exits learn: rotational (default), or gradual."""
    rotation: int | None = None
    """R: every R-th layer learns in a step; default: 8."""
    learning_rate: float | None = None
    """Default: 3e-5, from scratch 8e-4."""
    batch_size: int | None = None
    """Rows in a step; default: 4."""
    max_length: int | None = None
    """Tokens in a row; default: 2048."""
    epochs: int | None = None
    """Default: 1."""
    max_steps: int | None = None
    """Steps at the most; default: all."""
    seed: int = 0
    """Decides rows, dropout and, from scratch, the first weights."""


@takes(recipe=group(RecipeOptions))
def layerskip(
    out: common.Out,
    model: options.Model = "demo",
    data: common.Data = "demo",
    from_scratch: Annotated[bool, typer.Option(help="Draw new weights: config and tokenizer are enough.")] = False,
    *,
    recipe: Settings,
    dtype: Annotated[str, typer.Option(help="Of products: float32, bfloat16, or auto: bfloat16 on GPUs.")] = "auto",
    device: options.Device = "auto",
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Train a model whose early layers can speak: LayerSkip's layer dropout and early-exit loss.

    The folder is a model like any other: `ppd generate --method layerskip --model` uses it. Reported is what every exit
    reaches on held-out text. A training that was stopped goes on with the same command.

    The defaults are the paper's for continuing Llama 2 7B.
    """
    with one_line_errors(layerskip):
        from ppd_runtime.training.layerskip import recipe_for
        from ppd_runtime.training.layerskip_run import LayerSkipRun

        common.set_threads(threads)
        run = LayerSkipRun(model, data, recipe_for(from_scratch, **recipe), out, dtype, device)
        common.train_and_report(run, "LayerSkip training", "model", _print_report, as_json=as_json)


def _print_report(report: "LayerSkipReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("exit layer", "loss", "agrees with full depth"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = {score.layer: score for score in report.before}
    for score in report.after:
        old = before.get(score.layer)
        loss, agreement = (f"{old.loss:.4f} → ", f"{old.agreement:.4f} → ") if old else ("", "")
        table.add_row(str(score.layer), f"{loss}{score.loss:.4f}", f"{agreement}{score.agreement:.4f}")
    Console().print(table, highlight=False)
