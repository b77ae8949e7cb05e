"""`ppd`: the commands by name, of which only those that are asked for are read in."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from ppd_runtime import __version__
from ppd_runtime.cli.errors import OneLineGroup, one_line_errors

_COMMANDS = (
    "generate",
    "chat",
    "serve",
    "demo",
    "tradeoff",
    "match-rate",
    "quantize",
    "plan",
    "bench",
    "search-layers",
    "adapt",
    "train",
)
"""In the order of help; each has a module of its name, and therein a function or, for a group of commands, an app."""


class _Commands(Mapping[str, Any]):
    """What each name runs, read in when somebody asks for it."""

    def __getitem__(self, name: str) -> Any:
        if name not in _COMMANDS:
            raise KeyError(name)
        own = name.replace("-", "_")
        with one_line_errors():  # Ctrl-C may come while it is read in
            command = getattr(importlib.import_module(f"ppd_runtime.cli.{own}"), own)
        if not isinstance(command, typer.Typer):
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(name)(command)
            command = app
        return typer.main.get_command(command)

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Ppd(OneLineGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # typer asks, and never writes


app = typer.Typer(
    cls=_Ppd,
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


if __name__ == "__main__":
    app()
