"""`ppd train layerskip`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.train import common

if TYPE_CHECKING:
    from ppd_runtime.training.layerskip_run import LayerSkipReport


def layerskip(
    out: common.Out,
    model: options.Model = "demo",
    data: common.Data = "demo",
    from_scratch: Annotated[
        bool, typer.Option(help="Draw the weights again: config and tokenizer are enough.")
    ] = False,
    max_dropout: Annotated[
        float | None, typer.Option(help="p_max: how often samples leave out the last layer; default: 0.1.")
    ] = None,
    dropout_curriculum: Annotated[
        str | None, typer.Option(help="S(t): constant, or exponential (from scratch the default).")
    ] = None,
    e_scale: Annotated[float | None, typer.Option(help="The early exits' weight, 0 to 1; default: 0.2.")] = None,
    exit_curriculum: Annotated[
        str | None, typer.Option(help="C(t, l), which exits learn: rotational (default), or gradual.")
    ] = None,
    rotation: Annotated[int | None, typer.Option(help="R: every R-th layer learns in a step; default: 8.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: 3e-5, from scratch 8e-4.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: 4.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens in a row; default: 2048.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: 1.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at the most; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Decides rows, dropout and, from scratch, the first weights.")] = 0,
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
        recipe = recipe_for(
            from_scratch,
            max_dropout=max_dropout,
            dropout_curriculum=dropout_curriculum,
            e_scale=e_scale,
            exit_curriculum=exit_curriculum,
            rotation=rotation,
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_length=max_length,
            epochs=epochs,
            max_steps=max_steps,
            seed=seed,
        )
        run = LayerSkipRun(model, data, recipe, out, dtype, device)
        report = common.train_and_finish(run)
        if as_json:
            print(json.dumps({"out": str(out), "steps": run.training.num_steps, **report.as_dict()}))
        else:
            common.say(common.summary("LayerSkip training", run, report.num_tokens))
            _print_report(report)
            common.say(f"the model is in {out}")


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
