"""`ppd train probe`."""

from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.train import common

if TYPE_CHECKING:
    from ppd_runtime.training.probe_report import ProbeReport


def probe(
    out: common.Out,
    model: options.Model = "demo",
    exit_layer: Annotated[
        int | None, typer.Option(help="The layer that drafts; default: a third of the depth, as adaspeed has it.")
    ] = None,
    data: common.Data = "demo",
    learning_rate: Annotated[float | None, typer.Option(help="Default: 1e-2.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step; default: the paper's 4.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens in a row; default: 512.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: 1.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps at the most; default: the paper's 500.")] = None,
    seed: common.Seed = 0,
    dtype: common.Dtype = "auto",
    device: options.Device = "auto",
    disk_gb: common.DiskGb = 4.0,
    threads: common.Threads = None,
    as_json: common.AsJson = False,
) -> None:
    """Train AdaSPEED's linear probe for one layer of a frozen model: will full depth choose what the exit drafts?

    `ppd generate --method adaspeed --stopping probe --probe` uses the folder. Reported is how well it predicts that on
    held-out text, beside the draft's own confidence. A training that was stopped goes on with the same command.
    """
    with one_line_errors(probe):
        from ppd_runtime.methods.early_exit import check_exit_layer
        from ppd_runtime.models.checkpoint.description import describe
        from ppd_runtime.training.probe import ProbeRecipe, ProbeRun

        common.set_threads(threads)
        layer = check_exit_layer(exit_layer, describe(model))
        changes = common.given(
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_length=max_length,
            epochs=epochs,
            max_steps=max_steps,
        )
        recipe = ProbeRecipe(exit_layer=layer, seed=seed, **changes)
        run = ProbeRun(model, data, recipe, out, dtype, device, disk_gb)
        title = f"probe for layer {layer} of {run.info.num_layers}"
        common.train_and_report(run, title, "probe", _print_report, as_json=as_json)


def _print_report(report: "ProbeReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("foretold by", "accuracy", "AUC", "loss"):
        table.add_column(heading, justify="left" if heading == "foretold by" else "right", no_wrap=True)
    for name, found in (("the probe", report.probe), ("the draft's probability", report.confidence)):
        table.add_row(name, f"{found.accuracy:.4f}", f"{found.auc:.4f}", f"{found.loss:.4f}")
    base = max(report.accepted, 1 - report.accepted)
    table.add_row("always the same", f"{base:.4f}", "0.5000", "")
    Console().print(table, highlight=False)
    common.say(f"full depth chooses {report.accepted:.4f} of the drafts")
