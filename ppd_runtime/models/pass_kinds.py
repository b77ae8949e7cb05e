"""Which passes through a layer there is compiled code for."""

from enum import IntEnum


class PassKind(IntEnum):
    """What a file of compiled code runs; 2 or more stands for a pass over just so many candidates of one position."""

    ONE = 1
    """One token."""
    SEVERAL = 0
    """Two or more tokens, each behind another one of them or behind the text."""
    WITHOUT_ATTENTION = -2
    """One token through a layer with its attention left out."""
    WITHOUT_MLP = -3
    """One token through a layer with its MLP left out."""
    HEAD = -4
    """The final norm and the head, over any few tokens; `head_kind` has the numbers of shorter heads."""


def head_kind(rows: int = 0) -> int:
    """What stands for a head of so many rows; 0 for the whole vocabulary's."""
    return PassKind.HEAD - rows


def head_rows(kind: int) -> int | None:
    """Rows of the head that a kind stands for, as `head_kind` has them; None where it stands for none."""
    return PassKind.HEAD - kind if kind <= PassKind.HEAD else None
