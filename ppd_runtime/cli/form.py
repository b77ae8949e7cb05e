"""Options that say what a text has to look like."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ppd_runtime.cli import options


@dataclass(frozen=True)
class Form:
    """What a text has to look like; one of these."""

    schema: Path | None = None
    """The text is JSON that a JSON schema allows. This file has it."""
    regex: str | None = None
    """The whole text matches this regular expression, in the syntax of Rust's regex package."""
    choice: tuple[str, ...] = ()
    """The text is this one; give it again for each text that it may be."""
    grammar: Path | None = None
    """The text is one of a grammar's, in Lark's syntax as llguidance takes it. This file has it."""

    def settings(self) -> dict[str, Any]:
        """The settings of `SamplingParams`, with the files' contents; raises ValueError for what is no text file."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name))}
        return {
            name: read_text(f"--{name}", value) if isinstance(value, Path) else value for name, value in given.items()
        }


FORM = options.group(Form, panel="What the text looks like", make=Form)


def read_text(option: str, file: Path) -> str:
    """The text in the file that an option names; ValueError if it has none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: no UTF-8 text at byte {error.start}; give a text file") from error
