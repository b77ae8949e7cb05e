"""Prompts out of JSON Lines files: one object a line with a "prompt" text; most other keys are ignored.

Files in Spec-Bench's form are read too: the first of "turns" is the prompt, and "category" its category. In a .txt file
each line is a prompt.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ppd_runtime.settings.checks import check_whole

SHIPPED = "demo"
"""Names the prompts that come with the package, half of them code and half prose."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    text: str
    category: str | None = None
    """The kind of prompt, by its file."""


def read_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts (None: all) of a file, or of the shipped set if `source` is "demo".

    Raises:
        ValueError: naming the file and the line that is broken, or a file that holds no prompt.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    path = _shipped_file() if source == SHIPPED else Path(source)
    try:
        with path.open("rb") as file:
            found = plain_lines(path, file) if path.suffix == ".txt" else texts_under(("prompt", "turns"), path, file)
            prompts = list(itertools.islice(found, limit))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a file of prompts, or {SHIPPED!r}") from error
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; {_form('prompt')}")
    return prompts


def _shipped_file() -> Path:
    return Path(str(resources.files("ppd_runtime.tune") / "prompts" / "demo.jsonl"))


def texts_under(keys: tuple[str, ...], path: Path, lines: Iterator[bytes]) -> Iterator[Prompt]:
    """Each line's text, under the first of the keys that its JSON object has; empty lines are skipped.

    Raises:
        ValueError: naming the file and the line that is broken.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = _object(line.rstrip())
                yield Prompt(_text(keys, row), _category(row))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error}; {_form(keys[0])}") from error


def plain_lines(path: Path, lines: Iterator[bytes]) -> Iterator[Prompt]:
    """Each line that is not empty as a prompt; raises ValueError naming one that is no UTF-8."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Prompt(line.rstrip(b"\r\n").decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: no UTF-8 text at byte {error.start}") from error


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON at column {error.colno} ({error.msg})") from error
    return row if isinstance(row, dict) else {}


def _text(keys: tuple[str, ...], row: dict[str, Any]) -> str:
    text = next((row[key] for key in keys if key in row), None)
    if isinstance(text, list) and text:  # the turns of a conversation
        text = text[0]
    if not isinstance(text, str) or not text:
        raise ValueError(f"no text under {' or '.join(map(json.dumps, keys))}")
    text.encode("utf-8")  # JSON can hold half a character, which no tokenizer takes
    return text


def _category(row: dict[str, Any]) -> str | None:
    category = row.get("category")
    if not isinstance(category, str) or not category:
        return None
    category.encode("utf-8")
    return category


def _form(key: str) -> str:
    return f'give one object a line, such as {{"{key}": "Once upon a time"}}'
