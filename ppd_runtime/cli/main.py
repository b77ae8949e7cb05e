"""`ppd`: the commands by name."""

from typing import Annotated

import typer

from ppd_runtime import __version__
from ppd_runtime.cli.bench import bench
from ppd_runtime.cli.demo import demo
from ppd_runtime.cli.errors import OneLineGroup
from ppd_runtime.cli.generate import generate
from ppd_runtime.cli.match_rate import match_rate
from ppd_runtime.cli.plan import plan
from ppd_runtime.cli.quantize import quantize
from ppd_runtime.cli.search_layers import search_layers
from ppd_runtime.cli.serve import serve
from ppd_runtime.cli.simulate import simulate
from ppd_runtime.cli.tradeoff import tradeoff
from ppd_runtime.cli.train import train

app = typer.Typer(
    cls=OneLineGroup,
    help="Predictive pipelined decoding: the same tokens, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ppd {__version__}")
        raise typer.Exit


@app.callback()
def ppd(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What comes before a command."""


app.command()(generate)
app.command()(serve)
app.command()(demo)
app.command()(tradeoff)
app.command("match-rate")(match_rate)
app.command()(simulate)
app.add_typer(train, name="train")
app.command()(quantize)
app.command()(plan)
app.command()(bench)
app.command("search-layers")(search_layers)

if __name__ == "__main__":
    app()
