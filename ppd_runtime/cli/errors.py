"""What a user sees of an error: one line, and an exit code that says whose mistake it was."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ppd_runtime.cli.exit_codes import FAILURE, INTERRUPTED, STOPPED, USAGE
from ppd_runtime.cli.sigterm import closed_by_sigterm
from ppd_runtime.cli.words import in_its_words

_EXTRA = "unexpected extra argument"
_NO_PLACE = (_EXTRA, "does not take a value")


@contextlib.contextmanager
def one_line_errors(command: Callable[..., Any] | None = None) -> Iterator[None]:
    """Turn a ValueError into exit code 2, a runtime's failure into 1 and Ctrl-C into 130, each with one line.

    With the function of a `command`, what was wrong is told in the words of its options. SIGTERM ends the command with
    exit code 143, its workers before it.
    """
    try:
        with closed_by_sigterm():
            yield
    except (typer.Exit, typer.Abort):  # RuntimeErrors by descent, but no failure
        raise
    except (ValueError, OSError) as error:
        _leave(in_its_words(error, command) if command else str(error), _code(error))
    except RuntimeError as error:
        _leave(str(error), FAILURE)
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
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
        print_what_can_be_printed()
        names = (prog_name, complete_var)
        if not standalone_mode or not (sys.argv[1:] if args is None else args):  # without arguments there is help
            return super().main(args, *names, standalone_mode, windows_expand_args, **extra)
        try:
            sys.exit(super().main(args, *names, False, windows_expand_args, **extra))
        except typer.Abort:  # Ctrl-C outside a command
            raise KeyboardInterrupt from None
        except typer.TyperException as error:
            words = sys.argv[1:] if args is None else args
            line = error.format_message()
            file = _file_behind_json(words) if any(reason in line for reason in _NO_PLACE) else ""
            told = f"--json prints on standard output and takes no file: give --out {file}" if file else ""
            _write_line(told or _misplaced_model(error) or f"{_given(error)}{line}")
            sys.exit(error.exit_code)


def _given(error: Exception) -> str:
    """The value that pydantic, which typer asks, found wrong."""
    details: list[Any] = getattr(error.__cause__, "errors", list)()
    return f"{details[0]['input']!r}: " if details else ""


def _misplaced_model(error: typer.TyperException) -> str:
    """What to say where a model's name is an argument and has to be an option, or the other way round; else nothing."""
    line, own = error.format_message(), getattr(getattr(error, "cmd", None), "params", ())
    known = {name for parameter in own for name in parameter.opts}
    if _EXTRA in line and "--model" in known and "model" not in known:
        words = line.partition("(s) ")[2].strip("()")
        return f"no place for {words!r}: give a model as --model NAME"
    if line.startswith("No such option: --model ") and "model" in known:
        return "no option --model: give the model as the first argument, without it"
    return ""


def print_what_can_be_printed() -> None:
    """Have characters that the terminal's encoding lacks, such as ASCII's, replaced: they are no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def _file_behind_json(words: Sequence[str]) -> str:
    """A file's name behind --json, which earlier versions had in some commands; empty where there is none."""
    for word, behind in zip(words, (*words[1:], "-"), strict=True):
        name, _, value = word.partition("=")
        if name == "--json" and (value or not behind.startswith("-")):
            return value or behind
    return ""


def _code(error: Exception) -> int:
    return USAGE if isinstance(error, ValueError) else FAILURE


def _leave(line: str, code: int) -> None:
    _write_line(line)
    raise typer.Exit(code) from None


def _write_line(text: str) -> None:
    sys.stderr.write(f"ppd: {' '.join(text.split())}\n")
