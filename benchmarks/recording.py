"""What every benchmark has in common: options, the machine and versions it ran on, and tables."""

import argparse
import json
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppd_runtime.files.atomic import atomic_file
from ppd_runtime.tune import figures as tune_figures
from ppd_runtime.tune.measured_on import machine, versions
from ppd_runtime.tune.tables import markdown_table

Figures = dict[str, Any]


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[Any], Figures], table: Callable[[Figures], str]) -> Figures:
    """Measure as the command line says; print the table, write the figures. A mistaken value ends with exit code 2."""
    options = parser.parse_args()
    try:
        figures = measure(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {' '.join(str(error).split())}\n")
    print(table(figures))
    if options.json:
        with atomic_file(options.json) as unfinished:
            unfinished.write_text(json.dumps(figures | environment(), indent=2) + "\n")
    return figures


def environment() -> Figures:
    """The machine, the versions and the commit."""
    return {"machine": machine(), "versions": versions(), "commit": _commit()}


def spread(values: Sequence[float]) -> str:
    """Median and quartiles, with three significant digits."""
    if len(values) < 2:
        return f"{values[0]:.3g}"
    found = tune_figures.spread(values)
    return f"{found.median:.3g} ({found.low:.3g} to {found.high:.3g})"


def table_of(rows: Sequence[Mapping[str, Any]], **heads: str) -> str:
    """A table of rows under heads by their keys; a list of numbers is shown as median and quartiles."""
    cells = [[_shown(row[name]) for name in heads] for row in rows]
    return markdown_table(list(heads.values()), cells)


def _shown(value: object) -> object:
    return (spread(value) if value else None) if isinstance(value, list) else value


def positive(text: str) -> int:
    """An option's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def whole_numbers(text: str) -> list[int]:
    """An option's whole numbers above 0, with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def names(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Reads an option's names, with separators between them, of which each is known."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(separator)]
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{min(unknown)}: choose from {f'{separator} '.join(known)}")
        return found

    return read


def share(text: str) -> float:
    """An option's share from 0 to 1."""
    if not 0 <= (found := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share from 0 to 1")
    return found


def slug(environment: Mapping[str, Any]) -> str:
    """The machine's kind as a file's name: its processor and cores, without trade marks and clock rate."""
    kind = re.sub(r"\((r|tm)\)|\b(processor|cpu)\b|@ [\d.]+ghz", " ", environment["machine"].lower())
    return re.sub(r"[^a-z0-9]+", "-", kind).strip("-")


def _commit() -> str | None:
    """The commit that ran, with a mark where files differ from it; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
