"""The user's cache folder: files of compiled code and of findings, named by a hash of all that went into them."""

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ppd_runtime.files.checksummed import find, keep

logger = logging.getLogger(__name__)
ROOT = 0


def cache_folder() -> Path:
    """The user's own cache folder, made if need be: `$XDG_CACHE_HOME/ppd_runtime`, or in `~/.cache`; or the
    administrator's, which the user may read.

    Raises:
        ValueError: if it cannot be made, or others may put code there that would be run here.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ValueError(f"cache folder: {error} Set XDG_CACHE_HOME to a folder") from error
    return _safe(Path(base) / "ppd_runtime")


def temporary_folder() -> Path:
    """The user's folder for what cannot be kept in the cache folder; the system empties it some day.

    Raises:
        ValueError: as `cache_folder`.
    """
    folder = _temporary_place()
    if folder.is_symlink():  # anybody may have put it there
        raise ValueError(f"cache folder {folder} is a link; remove it, or set XDG_CACHE_HOME to another folder")
    return _safe(folder)


def _temporary_place() -> Path:
    try:
        return Path(tempfile.gettempdir()) / f"ppd_runtime-{_user()}"
    except OSError as error:
        raise ValueError(f"no temporary folder ({error}), set TMPDIR to one") from error


def _safe(folder: Path) -> Path:
    """The folder, made if need be, where only the user and the administrator may write."""
    way_out = "make it your own alone (chmod 700), or set XDG_CACHE_HOME to another folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise ValueError(f"cache folder {folder}: {error.strerror}; {way_out}") from error
    if about.st_uid not in {_user(), ROOT} or about.st_mode & 0o022:
        raise ValueError(f"cache folder {folder} holds code to run and others may write there; {way_out}")
    return folder


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else ROOT


def with_way_out(error: Exception) -> str:
    """An error's text with a way out."""
    hint = "" if "XDG_CACHE_HOME" in str(error) else "; set XDG_CACHE_HOME to a folder that can be written"
    return f"{error}{hint}"


def ingredients_name(ingredients: Mapping[str, Any]) -> str:
    """The name that stands for `ingredients` (JSON values): 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()[:32]


def capabilities(device: torch.device) -> list[str]:
    """The capabilities of a device that decide which code is possible and fast."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)


def artifact(ingredients: Mapping[str, Any], make: Callable[[Path], None], suffix: str = ".pt2") -> Path:
    """The file made from `ingredients` (JSON values), by `make(path)` if it is missing or damaged.

    If the cache folder cannot have it, it is in `temporary_folder`, with a line of warning.

    Two processes that make the same file at once both succeed, and readers only ever see a whole one.

    Raises:
        ValueError: if there is no folder to make it in.
    """
    name = ingredients_name(ingredients)
    if found := kept_artifact(name, suffix):
        return found
    with _told_in_a_line(), tempfile.TemporaryDirectory(prefix="ppd-making-") as making:
        made = Path(making, f"{name}{suffix}")
        make(made)
        return _kept(made, name, suffix)


def kept_artifact(name: str, suffix: str = ".pt2") -> Path | None:
    """The whole file for a name of `ingredients_name`; None if there is none; raises as `artifact`."""
    with _told_in_a_line():
        return next((found for folder in _folders() if (found := find(folder, name, suffix))), None)


@contextlib.contextmanager
def _told_in_a_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"compile: {error}; set XDG_CACHE_HOME and TMPDIR to folders that can be written") from error


def _folders() -> Iterator[Path]:
    """Where to look."""
    try:
        yield cache_folder()
    except ValueError as error:
        logger.debug("nothing is kept there: %s", error)
    try:
        if _temporary_place().exists():
            yield temporary_folder()
    except ValueError as error:
        logger.debug("nothing is kept there: %s", error)


def _kept(made: Path, name: str, suffix: str) -> Path:
    try:
        return keep(made, cache_folder(), name, suffix)
    except (OSError, ValueError) as error:
        kept = keep(made, temporary_folder(), name, suffix)
        logger.warning("compiled code stays in %s only: %s", kept.parent, with_way_out(error))
        return kept
