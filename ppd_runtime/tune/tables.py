"""Tables of results, in Markdown and as plain text for a terminal.

A cell may be any value: floats get three decimals unless another format is given, None is a dash.
"""

from collections.abc import Sequence

Rows = Sequence[Sequence[object]]


def markdown_table(heads: Sequence[str], rows: Rows, number: str = ".3f") -> str:
    """A table in Markdown, whatever characters its cells hold."""
    lines = [[text.replace("|", "\\|") for text in line] for line in _texts(heads, rows, number)]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain_table(heads: Sequence[str], rows: Rows, number: str = ".3f") -> str:
    """Columns side by side under a rule, the first one to the left, the others to the right."""
    lines = _texts(heads, rows, number)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            text.rjust(width) if place else text.ljust(width) for place, (text, width) in enumerate(columns)
        ).rstrip()
        for columns in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _texts(heads: Sequence[str], rows: Rows, number: str) -> list[list[str]]:
    return [[" ".join(_text(cell, number).split()) for cell in line] for line in (heads, *rows)]


def _text(value: object, number: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return format(value, number) if isinstance(value, float) else str(value)
