"""Which passes through a layer there is compiled code for."""

from enum import IntEnum


class PassKind(IntEnum):
    """What a file of compiled code runs; n of 2 or more is a pass over exactly n candidates of one position."""

    ONE = 1
    """One token."""
    SEVERAL = 0
    """Two or more tokens, each after another one of them or after the text."""
    WITHOUT_ATTENTION = -2
    """One token through a layer with its attention left out."""
    WITHOUT_MLP = -3
    """One token through a layer with its MLP left out."""
    HEAD = -4
    """The final norm and the head, over any few tokens; `head_kind` has the numbers of shorter heads."""


def head_kind(rows: int = 0) -> int:
    """The kind of a head with `rows` rows; 0 is the whole vocabulary."""
    return PassKind.HEAD - rows


def head_rows(kind: int) -> int | None:
    """Rows of the head of a kind, the inverse of `head_kind`; None if the kind is no head."""
    return PassKind.HEAD - kind if kind <= PassKind.HEAD else None
