"""The folder of the sockets between workers, and what removes it where its owner could not."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile

from ppd_runtime.launch import orphan_reaper

_KEEPER_S = 0.3  # that it takes where no process is left to end


_LONGEST_BASE = 24  # a socket's path has 107 bytes, of which Ray's own names take some seventy


class SocketFolder:
    """A new folder that only this user may enter, with a path short enough for the sockets in it.

    A small process looks after it: when the folder is removed, or this process ends without warning, it ends workers
    and processes of Ray that still have a file open there, and removes what they left, within some seconds.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.path = tempfile.mkdtemp(prefix="ppd-", dir=base if len(base) <= _LONGEST_BASE else "/tmp")
        keeper = [sys.executable, "-I", "-S", orphan_reaper.__file__, self.path, str(os.getpid())]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._keeper.stdin and not self._keeper.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.communicate(b"\n", _KEEPER_S)
