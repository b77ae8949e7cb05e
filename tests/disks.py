"""File systems of a test's own: small ones, to be filled, and such as can be read only."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """An empty file system of that size; skips the test where this user may not make one."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def read_only(folder: Path) -> None:
    """Have nothing written to it any more, by any process."""
    _mount("-o", "remount,ro", str(folder))


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no file systems can be made here: {error}")
    if done.returncode:
        pytest.skip(f"no file systems can be made here: {done.stderr.strip()}")
