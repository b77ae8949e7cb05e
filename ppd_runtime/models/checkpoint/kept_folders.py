"""Model folders in the cache folder, each made once of files in another form: whole, checked, and removed if unused."""

import contextlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ppd_runtime.files.cache_folder import ingredients_name, with_way_out
from ppd_runtime.files.checksummed import checksum, count_as_used, has_checksum, only_one, version_of
from ppd_runtime.models.checkpoint.config import read_json

logger = logging.getLogger(__name__)
_PATIENCE_S = 1800.0  # for another process that writes the same model
_TAKES_LONG = 2**28
"""From this many bytes of weights, a start logs why it takes long."""
_UNUSED_S, _ORPHANED_S = 14 * 24 * 3600.0, 24 * 3600.0
"""As with other kept copies, making one removes those unopened for `_UNUSED_S`, or for `_ORPHANED_S` if a file that it
was made of has gone or changed."""


def find_or_make(
    model: str, place: Path, card: str, about: Callable[[], Mapping[str, Any]], write: Callable[[Path, str], None]
) -> Path:
    """The folder in `place` that was made of these ingredients, made if there is none yet.

    Args:
        model: the model's name, for messages.
        card: the name of the file that holds the ingredients and the checksums of the folder's other files.
        about: reads the ingredients; "files" are paths with what `version_of` gives.
        write: puts the model's files into an empty folder, which gets this name when it is whole.

    Raises:
        ValueError: as `write` does, with the model's name; or if the folder cannot be written.
    """
    ingredients = dict(about())
    folder = place / ingredients_name(ingredients)
    if _is_whole(folder, card):
        count_as_used(folder / card)
        return folder
    try:
        place.mkdir(exist_ok=True)
        with only_one(place, folder.name, _PATIENCE_S):
            if not _is_whole(folder, card):
                _remove_unused(place, card)
                if folder.exists():
                    logger.warning("%s is damaged, so it is removed and made again", folder)
                    shutil.rmtree(folder)
                with tempfile.TemporaryDirectory(dir=place, prefix=".unfinished-") as making:
                    unfinished = Path(making, "model")
                    unfinished.mkdir()
                    write(unfinished, folder.name)
                    if ingredients != dict(about()):
                        raise ValueError("has changed meanwhile; open it again")
                    checksums = {file.name: checksum(file) for file in sorted(unfinished.iterdir()) if file.is_file()}
                    (unfinished / card).write_text(json.dumps({**ingredients, "checksums": checksums}, indent=2) + "\n")
                    unfinished.replace(folder)
    except ValueError as error:
        raise ValueError(f"model {model!r} {error}") from error
    except OSError as error:
        raise ValueError(f"model {model!r} cannot be kept: {with_way_out(error)}") from error
    return folder


def begin_writing(num_bytes: int, place: Path, of: Path, advice: str = "") -> None:
    """Log that a model of so many bytes is written there, and how to do better; ValueError if there is too little
    room."""
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        needs = f"needs {num_bytes / 1e9:.3g} GB in {place}, and {free / 1e9:.3g} GB are free"
        raise ValueError(f"{needs}; free some, or set XDG_CACHE_HOME to another folder")
    level = logging.WARNING if num_bytes > _TAKES_LONG else logging.INFO
    size = f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.3g} MB"
    logger.log(level, "%s is written as a model folder of %s, once, to %s%s", of, size, place, advice)


def _is_whole(folder: Path, card: str) -> bool:
    """Whether the folder exists, with the files that were written."""
    try:
        checksums = read_json(folder / card)["checksums"]
        return all(has_checksum(folder / name, value) for name, value in checksums.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _remove_unused(place: Path, card: str) -> None:
    """Remove folders that nobody opens any more, and what a killed process left."""
    for old in place.iterdir():
        with contextlib.suppress(OSError, ValueError):  # another removes it
            about = old / card
            used = (about if about.exists() else old).stat().st_mtime
            if old.is_dir() and time.time() - used > (_UNUSED_S if _is_of_use(about) else _ORPHANED_S):
                shutil.rmtree(old)  # a process that has mapped its weights keeps them


def _is_of_use(about: Path) -> bool:
    """Whether what a folder was made of is still the same."""
    try:
        files = read_json(about)["files"]
        return all(version_of(Path(file)) == version for file, *version in files)
    except (OSError, ValueError, KeyError, TypeError):
        return False
