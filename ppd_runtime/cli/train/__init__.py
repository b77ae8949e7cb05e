"""`ppd train`: the training recipes by name."""

import typer

from ppd_runtime.cli.train.adapter import adapter
from ppd_runtime.cli.train.exit_head import exit_head
from ppd_runtime.cli.train.layerskip import layerskip
from ppd_runtime.cli.train.probe import probe

train = typer.Typer(
    name="train",
    help="Train what makes early guesses better. Only layerskip trains the model itself, and writes a new one.",
    no_args_is_help=True,
    add_completion=False,
)
train.command("exit-head")(exit_head)
train.command("adapter")(adapter)
train.command("probe")(probe)
train.command("layerskip")(layerskip)
