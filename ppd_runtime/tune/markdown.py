"""Tables in Markdown."""

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, whatever characters they hold."""
    lines = [[_escaped(cell) for cell in row] for row in (columns, *rows)]
    lines.insert(1, ["---"] * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: object, number: str = ".3f") -> str:
    """A table's text for a value: `number` is the format of floats; None is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, number) if isinstance(value, float) else str(value)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
