"""What happens to files: bytes change, and their size does not."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file


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


def with_numbers(model: Path, out: Path, name: str, place: object, number: float) -> Path:
    """A copy of a model's folder in which a part of one weight is this number."""
    shutil.copytree(model, out)
    weights = load_file(out / "model.safetensors")
    weights[name][place] = number
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


WAYS: dict[str, Callable[[Path], None]] = {"a bit": flip, "a block": clear, "cut short": cut}
