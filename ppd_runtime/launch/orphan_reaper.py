"""Removes what a program that ends without warning leaves: `python orphan_reaper.py FOLDER PID`.

It waits until the program has ended, or closes the other end of this script's standard input, or writes there; a fork
of the program may hold that end longer than the program runs. Then workers and Ray processes that still use the folder
have a moment to end by themselves, are killed otherwise, and the folder is removed. The script imports nothing of ours
to be small: it runs as long as the program does.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_S = 5.0


def users_of(folder: str) -> set[int]:
    """Workers and processes of Ray that have a file in the folder open, on systems with a /proc.

    The program's own children may have inherited such a file: they do not count.
    """
    users = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(folder + os.sep) and _is_ours(link.parents[1] / "cmdline"):
                users.add(int(link.parts[2]))
    return users


def _is_ours(command_line: Path) -> bool:
    words = command_line.read_bytes().decode(errors="replace").split("\0")
    if "ppd_runtime.workers.entry" in words or words[0].startswith("ray::"):
        return True
    return any(f"{os.sep}ray{os.sep}" in word for word in words[:4])  # its servers and agents


def clear(folder: str, grace_s: float = GRACE_S) -> None:
    """End what uses the folder after a moment of grace, and remove it."""
    deadline = time.monotonic() + grace_s
    while users_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    for user in users_of(folder):
        with contextlib.suppress(OSError):
            os.kill(user, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def wait_for_end(pid: int) -> None:
    """Wait until a process ends, or closes standard input or writes there."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    if hasattr(os, "pidfd_open"):
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            return
        except OSError:  # a kernel without it
            pass
    poll.poll()


def main() -> None:
    """Wait for the end, then clear."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait_for_end(int(sys.argv[2]))
    clear(sys.argv[1])


if __name__ == "__main__":
    main()
