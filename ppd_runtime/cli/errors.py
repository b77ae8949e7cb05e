"""What a user sees of an error: one line, and an exit code that says whose mistake it was."""

import contextlib
import sys
from collections.abc import Iterator

import typer

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a ValueError into exit code 2, a runtime's failure into 1 and Ctrl-C into 130, each with one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        _leave(error, USAGE if isinstance(error, ValueError) else FAILURE)
    except RuntimeError as error:
        _leave(error, FAILURE)
    except KeyboardInterrupt:
        sys.stderr.write("\nppd: stopped\n")
        raise typer.Exit(INTERRUPTED) from None


def _leave(error: Exception, code: int) -> None:
    sys.stderr.write(f"ppd: {' '.join(str(error).split())}\n")
    raise typer.Exit(code) from None
