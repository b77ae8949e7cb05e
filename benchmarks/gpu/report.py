"""The Markdown report of what the stages have found; plain, for a machine that has little installed."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from ppd_runtime.tune.tables import markdown_table

_TITLE = "Figures of one GPU"
_NOTES = {"pipelines": "Workers share the GPU and take turns: times say nothing of several, the tokens do."}


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """A section for each stage, with its tables and what went wrong."""
    now = datetime.datetime.now(datetime.timezone.utc)
    pretend = any(line["pretend"] for line in lines)
    parts = [f"# {_TITLE}", f"{now:%Y-%m-%d %H:%M} UTC, `python -m benchmarks.gpu{' --pretend' * pretend}`."]
    if pretend:
        parts.append("PRETENDED on a CPU with little models: no figure below means anything.")
    failed = [line["stage"] for line in lines if line["error"]]
    wrong = [line["stage"] for line in lines if any(row.get("equal") is False for row in line["rows"])]
    parts.append(
        f"Failed: {', '.join(failed) or 'none'}. Not equal where they should be: {', '.join(wrong) or 'none'}."
    )
    for line in lines:
        parts.append(f"## {line['stage']}, {line['seconds']:.0f} s")
        parts += [f"FAILED: {line['error']}"] * bool(line["error"])
        if line["stage"] in _NOTES:
            parts.append(_NOTES[line["stage"]])
        parts += _tables(line["rows"])
    return "\n\n".join(parts) + "\n"


def _tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of the same columns make one table."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    return [markdown_table(columns, [list(row.values()) for row in found], ".4g") for columns, found in kinds.items()]
