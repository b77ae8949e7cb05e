"""Files of a cache folder whose names bear a checksum of their contents: NAME-CHECKSUM.SUFFIX.

Damage is found before anybody maps, loads or runs a file. A name and its checksum appear together, so that no moment
and no crash parts them.
"""

import contextlib
import json
import logging
import os
import platform
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from ppd_runtime.files.large_pages import read_in_large_pages
from ppd_runtime.host import available_cores

logger = logging.getLogger(__name__)
BLOCK = 2**23
"""Bytes of a block: a file's checksum is made of its blocks'."""
UNFINISHED, CHECKED = ".unfinished", ".checked"
"""Endings of files that are being written, and of notes on what was found whole."""
WORTH_NOTING = 2**24
"""From this many bytes, a host's processes rely on each other's checks; smaller files take no time."""
PATIENCE_S = 60.0
"""Longest wait for another process that checks or makes the same file."""
_LATELY_S = 300.0
"""How long a note counts: a start's processes share a check, a later start makes its own."""
_TOUCH_S = 3600.0
_CHUNK = 2**20  # bytes read at once: they stay in the core's cache until they are summed
_MOST_THREADS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def checksum(path: Path) -> str:
    """A file's checksum, 8 hexadecimal digits by `of_blocks`; uses all cores.

    Raises:
        OSError: if it cannot be read.
    """
    starts = range(0, path.stat().st_size, BLOCK)
    if len(starts) < 2:
        return of_blocks(_of_block(path, start) for start in starts)
    with ThreadPoolExecutor(min(_MOST_THREADS, available_cores())) as threads:
        return of_blocks(threads.map(lambda start: _of_block(path, start), starts))


def of_blocks(sums: Iterable[int]) -> str:
    """The checksum of a file whose blocks have these CRC-32s: the CRC-32 of them all, little-endian, in a row."""
    return f"{zlib.crc32(b''.join(value.to_bytes(4, 'little') for value in sums)):08x}"


def is_whole(path: Path) -> bool:
    """Whether a file can be read and holds what its name says."""
    try:
        return path.stem.rpartition("-")[2] == checksum(path)
    except OSError:
        return False


def has_checksum(path: Path, value: str) -> bool:
    """Whether a file has this checksum, as this host found a moment ago or finds now.

    Raises:
        OSError: if it cannot be read.
    """
    if not _is_small(path) and _whole_lately(path):
        return True
    identity = version_of(path)
    if checksum(path) != value:
        return False
    note_whole(path, identity)
    return True


def find(folder: Path, name: str, suffix: str) -> Path | None:
    """The file of this name, if this host found it whole a moment ago or finds it whole now; else None. A damaged one
    is removed with a line of warning; the caller makes it again.

    Raises:
        OSError: if others take too long with it.
    """
    paths = _named(folder, name, suffix)
    for path in paths:
        if _whole_lately(path) or (_is_small(path) and is_whole(path)):
            count_as_used(path)
            return path
    if not paths:
        return None
    with only_one(folder, name):
        return find_alone(folder, name, suffix)


def find_alone(folder: Path, name: str, suffix: str) -> Path | None:
    """Like `find`, for the process that holds `only_one`."""
    for path in _named(folder, name, suffix):
        if _whole_lately(path):
            return path
        count_as_used(path)
        with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
            identity = version_of(path)
            if not _is_small(path):
                read_in_large_pages(path)
            if is_whole(path):
                note_whole(path, identity)
                return path
            logger.warning("%s is damaged, so it is removed and made again", path)
            with contextlib.suppress(OSError):  # read-only: this comes again each time
                path.unlink(missing_ok=True)
    return None


def keep(made: Path, folder: Path, name: str, suffix: str) -> Path:
    """Put a made file into the folder; if another process was quicker, its file stays.

    Raises:
        OSError: if it cannot be written.
    """
    with only_one(folder, name):
        if there := find_alone(folder, name, suffix):
            return there
        path = folder / f"{name}-{checksum(made)}{suffix}"
        with unfinished(path) as new:
            shutil.copyfile(made, new)
            new.replace(path)
        return path


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A unique name beside `path`, even where locks do not work; what is left under it is removed later."""
    own = path.with_name(f"{path.name}-{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield own
    finally:
        with contextlib.suppress(OSError):  # a read-only folder has none
            own.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(folder: Path, name: str, patience_s: float | None = None) -> Iterator[None]:
    """Allow one process of this host at a time for a name; several if no lock can be had.

    Raises:
        OSError: a Timeout, if the others take longer than `patience_s`, by default `PATIENCE_S`.
    """
    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    try:
        lock = FileLock(folder / f"{name}.lock").acquire(timeout=PATIENCE_S if patience_s is None else patience_s)
    except TimeoutError:
        raise
    except (OSError, NotImplementedError) as error:  # it can be read only, it is full, it has no locks
        logger.debug("no lock in %s: %s", folder, error)
    with lock:
        yield


def note_whole(path: Path, identity: list[int] | None = None) -> None:
    """Tell this host's other processes for a while that a file is whole, as when it had this identity."""
    if not _is_small(path):
        with contextlib.suppress(OSError):  # no place for a note: the others look for themselves
            _note(path).write_text(json.dumps([time.time(), *(identity or version_of(path))]))


def _named(folder: Path, name: str, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"{name}-{'[0-9a-f]' * 8}{suffix}"))


def _of_block(path: Path, start: int) -> int:
    """The CRC-32 of the block that starts there. Mapped memory would end the process if a disk cannot be read."""
    memory, value, left = memoryview(bytearray(_CHUNK)), 0, BLOCK
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(memory[:left]) or 0):
            value, left = zlib.crc32(memory[:count], value), left - count
    return value


def _is_small(path: Path) -> bool:
    try:
        return path.stat().st_size < WORTH_NOTING
    except OSError:
        return True


def _whole_lately(path: Path) -> bool:
    """Whether a process of this host has found it whole, and it has not been written to since."""
    try:
        when, *identity = json.loads(_note(path).read_text())
        return abs(time.time() - when) < _LATELY_S and identity == version_of(path)
    except (OSError, ValueError, TypeError):
        return False


def version_of(path: Path) -> list[int]:
    """Numbers that change when a file does; raises OSError if it cannot be opened."""
    with path.open("rb") as file:  # network file systems look again when a file is opened
        about = os.fstat(file.fileno())
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _note(path: Path) -> Path:
    """Where this host notes that a file is whole: another one that shares the folder may read something else."""
    try:
        host = _BOOT.read_text()
    except OSError:
        host = platform.node()
    return path.with_name(f"{path.stem}-{zlib.crc32(host.encode()):08x}{CHECKED}")


def count_as_used(path: Path) -> None:
    """Mark as recently used, but seldom: this changes the identity that a note is about."""
    with contextlib.suppress(OSError):  # a read-only folder
        if time.time() - path.stat().st_mtime > _TOUCH_S:
            os.utime(path)
