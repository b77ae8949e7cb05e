"""Files that a command will write: mistakes in their names show before any work is done."""

import os
from pathlib import Path


def check_outputs(*paths: Path | None) -> None:
    """Raise ValueError for a path that names no file in a folder that can be written to, or that comes twice."""
    given = [path for path in paths if path is not None]
    for number, path in enumerate(given):
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"{path}: give a file in a folder that exists")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is a device or a pipe, which would be replaced; give a file")
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"{path}: its folder cannot be written to; give a file in another")
        if path.resolve() in [other.resolve() for other in given[:number]]:
            raise ValueError(f"{path}: is to be written twice; give each its own file")
