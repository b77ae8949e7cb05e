"""What a user sees of an error: one line, and an exit code that says whose mistake it was."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a ValueError into exit code 2, a runtime's failure into 1 and Ctrl-C into 130, each with one line."""
    try:
        yield
    except (typer.Exit, typer.Abort):  # RuntimeErrors by descent, but nobody's failure
        raise
    except (ValueError, OSError) as error:
        _leave(error, USAGE if isinstance(error, ValueError) else FAILURE)
    except RuntimeError as error:
        _leave(error, FAILURE)
    except KeyboardInterrupt:
        sys.stderr.write("\nppd: stopped\n")
        raise typer.Exit(INTERRUPTED) from None


class OneLineGroup(TyperGroup):
    """Commands whose mistaken options and arguments get one line too, in place of typer's box."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command; a mistake on the command line ends with exit code 2."""
        names = (prog_name, complete_var)
        if not standalone_mode or not (sys.argv[1:] if args is None else args):  # without arguments there is help
            return super().main(args, *names, standalone_mode, windows_expand_args, **extra)
        try:
            sys.exit(super().main(args, *names, False, windows_expand_args, **extra))
        except typer.TyperException as error:
            _write_line(f"{_given(error)}{error.format_message()}")
            sys.exit(error.exit_code)


def _given(error: Exception) -> str:
    """The value that pydantic, which typer asks, found wrong."""
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    return f"{details[0]['input']!r}: " if details else ""


def _leave(error: Exception, code: int) -> None:
    _write_line(str(error))
    raise typer.Exit(code) from None


def _write_line(text: str) -> None:
    sys.stderr.write(f"ppd: {' '.join(text.split())}\n")
