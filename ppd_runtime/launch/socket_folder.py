"""The folder of the sockets between workers, and what removes it if its owner cannot."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.launch import orphan_reaper

_KEEPER_S = 0.3  # that it takes if no process is left to end
_USUAL = "/tmp"
_LONGEST_NAME = len("worker-1000")


class SocketFolder:
    """A new folder that only this user may enter, with a path short enough for the sockets in it.

    It is in the system's temporary folder, else in another that can be written and has a short path.

    A small process looks after it: when the folder is removed, or this process ends without warning, it ends workers
    and processes of Ray that still have a file open there, and removes what they left, within some seconds.

    Args:
        longest_name: bytes of a socket's path below the folder; the system allows some hundred for all of it.

    Raises:
        ValueError: if there is no such folder.
    """

    def __init__(self, longest_name: int = _LONGEST_NAME) -> None:
        self.path = _new_folder(longest_name)
        keeper = [sys.executable, "-I", "-S", orphan_reaper.__file__, self.path, str(os.getpid())]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True)

    def __enter__(self) -> "SocketFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._keeper.stdin and not self._keeper.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.communicate(b"\n", _KEEPER_S)


def _new_folder(longest_name: int) -> str:
    refused = []
    for place in dict.fromkeys(_places()):
        try:
            return _folder_in(place, longest_name)
        except OSError as error:
            refused.append(f"{place}: {error.strerror or error}")
    reasons = "; ".join(refused)
    raise ValueError(f"there is no folder for sockets ({reasons}): set TMPDIR to a short one that can be written")


def _places() -> Iterator[str]:
    with contextlib.suppress(OSError):  # there is none
        yield tempfile.gettempdir()
    yield _USUAL
    if Path(own := os.environ.get("XDG_RUNTIME_DIR", "")).is_absolute():
        yield own
    with contextlib.suppress(ValueError):
        yield str(cache_folder())


def _folder_in(place: str, longest_name: int) -> str:
    """A new folder; raises OSError if it or a socket there cannot be made."""
    folder = Path(tempfile.mkdtemp(prefix="ppd-", dir=Path(place).resolve()))
    trial = folder / ("x" * longest_name)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(trial))
        trial.unlink()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return str(folder)
