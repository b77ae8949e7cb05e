"""What happens to files: bytes change, and their size does not."""

from collections.abc import Callable
from pathlib import Path


def flip(path: Path, place: int | None = None) -> None:
    """Change one bit, in the middle if nothing else is said; a negative place counts from the end."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 16
    path.write_bytes(content)


def clear(path: Path) -> None:
    """Zeros in place of the middle, as a file system leaves them that lost power."""
    content = bytearray(path.read_bytes())
    first, end = len(content) * 2 // 5, len(content) * 3 // 5
    content[first:end] = bytes(end - first)
    path.write_bytes(content)


def cut(path: Path) -> None:
    """The first half alone."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


WAYS: dict[str, Callable[[Path], None]] = {"a bit": flip, "a block": clear, "cut short": cut}
