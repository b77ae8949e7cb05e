"""Removes what a program leaves behind that ends without warning: `python leftovers.py FOLDER`.

It waits for a farewell, or until nobody holds the other end of its standard input. In that case whoever still uses the
folder has a moment to end by itself, is ended otherwise, and the folder is removed. It is a script that imports nothing
of ours, so that it is small: it lives as long as the program does.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 5.0


def users_of(folder: str) -> set[int]:
    """The processes of this user that have a file in the folder open, on systems with a /proc."""
    users = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(folder + os.sep):
                users.add(int(link.parts[2]))
    return users - {os.getpid()}


def clear(folder: str, grace_s: float = GRACE_S) -> None:
    """End whoever uses the folder after a moment of grace, and remove it."""
    deadline = time.monotonic() + grace_s
    while users_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    for user in users_of(folder):
        with contextlib.suppress(OSError):
            os.kill(user, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the end, then clear, unless that is done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not os.read(sys.stdin.fileno(), 1):
        clear(sys.argv[1])


if __name__ == "__main__":
    main()
