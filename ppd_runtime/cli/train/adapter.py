"""`ppd train adapter`."""

from typing import Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.train import common


def adapter(
    out: common.Out,
    model: options.Model = "demo",
    exit_layer: Annotated[int, typer.Option(help="The shallow layer after which it drafts.")] = 2,
    data: common.Data = "demo",
    learning_rate: Annotated[float | None, typer.Option(help="Default: 1e-3.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: 8.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens in a row; default: 512.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: the paper's 10.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at the most; default: all.")] = None,
    seed: common.Seed = 0,
    dtype: common.Dtype = "auto",
    device: options.Device = "auto",
    disk_gb: common.DiskGb = 4.0,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Train Kangaroo's adapter after a shallow layer of a frozen model: one attention and two norms.

    It learns full depth's own distribution. `ppd generate --method kangaroo --adapter` uses the folder. Reported is how
    often the bare exit and the adapter name full depth's choice on held-out text. A training that was stopped goes on
    with the same command.
    """
    with one_line_errors(adapter):
        from ppd_runtime.training.adapter import AdapterRecipe, AdapterRun

        common.set_threads(threads)
        changes = common.given(
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_length=max_length,
            epochs=epochs,
            max_steps=max_steps,
        )
        recipe = AdapterRecipe(exit_layer=exit_layer, seed=seed, **changes)
        run = AdapterRun(model, data, recipe, out, dtype, device, disk_gb)
        title = f"adapter for layer {exit_layer} of {run.info.num_layers}"
        common.train_and_report(run, title, "adapter", common.print_comparison, as_json=as_json)
