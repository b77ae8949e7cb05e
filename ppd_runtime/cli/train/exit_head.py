"""`ppd train exit-head`."""

from typing import Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.train import common


def exit_head(
    out: common.Out,
    model: options.Model = "demo",
    exit_layer: common.ExitLayer = None,
    data: common.Data = "demo",
    kind: Annotated[str, typer.Option(help="lm-head (the paper's), or a map: affine or gated.")] = "lm-head",
    recipe: Annotated[str | None, typer.Option(help="paper (lm-head's default), or quick (the others').")] = None,
    loss: Annotated[str | None, typer.Option(help="cross-entropy (paper), or distil (quick).")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Default: paper 2e-5, quick 2e-3.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: paper 128, quick 8.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens in a row; default: paper 2048, quick 512.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: paper 3, quick 1.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at the most; default: paper all, quick 200.")] = None,
    seed: common.Seed = 0,
    dtype: common.Dtype = "auto",
    device: options.Device = "auto",
    disk_gb: common.DiskGb = 4.0,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Train an exit head for one layer of a frozen model and report what it gains on held-out text.

    A training that was stopped goes on with the same command. `ppd generate --exit-head` and `ppd match-rate
    --exit-head` use the folder.

    --recipe paper is Table 4 of the paper, for large models and data. --recipe quick learns full depth's own
    distribution in a few minutes on two cores, for small ones. Single options change either.
    """
    with one_line_errors(exit_head):
        from ppd_runtime.training.exit_head import ExitHeadRun, recipe_for

        common.set_threads(threads)
        chosen = recipe_for(
            common.half_depth(model) if exit_layer is None else exit_layer,
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
        run = ExitHeadRun(model, data, chosen, out, dtype, device, disk_gb)
        title = f"{kind} for layer {chosen.exit_layer} of {run.info.num_layers}"
        common.train_and_report(run, title, "head", common.print_comparison, as_json=as_json)
