"""`ppd` in this process, without the seconds that an interpreter takes to import."""

from typing import Any

from typer.testing import CliRunner, Result

from ppd_runtime.cli.main import app


def ppd(*words: object, **options: Any) -> Result:
    """What a command prints, and its exit code."""
    return CliRunner().invoke(app, [*map(str, words)], **options)


def printed(*words: object) -> str:
    """What a command that succeeds prints on standard output."""
    result = ppd(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object, **options: Any) -> str:
    """The line that a mistaken command prints on standard error, and nothing else."""
    result = ppd(*words, **options)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert result.stderr.startswith("ppd: ")
    return result.stderr
