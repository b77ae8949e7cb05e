"""What a command gives besides its tables: JSON on standard output, and files, whose names are checked before."""

import json
import os
from pathlib import Path
from typing import Any


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


def check_image(path: Path | None) -> None:
    """Raise ValueError where an image that is to be drawn afterwards cannot be."""
    if path is not None:
        from ppd_runtime.files.images import check_image_file

        check_image_file(path)


def give_json(data: Any, as_json: bool, out: Path | None) -> None:
    """Print JSON values in a line, and write them into a file, where either is wanted."""
    if out is not None:
        from ppd_runtime.files.atomic import atomic_file

        with atomic_file(out) as unfinished:
            unfinished.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(data))
