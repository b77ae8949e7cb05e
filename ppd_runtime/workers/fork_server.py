"""Forks workers from a process that has imported everything: one import for all workers, restarted ones too.

The program starts it, `workers/entry.py` with the argument `NAME`, with one end of a pair of sockets as standard input.
For each worker it sends a name, with three descriptors that become the worker's standard streams. It gets back the
worker's process id, with a descriptor of that process, and a second message once the worker has ended. The server ends
when the other end is closed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import warnings
from pathlib import Path

NAME = "fork-server"
LONGEST_MESSAGE = 256
"""Bytes of a name or an answer."""
_NUM_STREAMS = 3


def fork_workers() -> None:
    """Serve the program at the other end of standard input; returns in every fork, as a worker with its own streams."""
    control = socket.socket(fileno=os.dup(0))
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the bell is rung
    while True:
        ready, _, _ = select.select([control, bell], [], [])
        if bell in ready:
            bell.recv(LONGEST_MESSAGE)
            _tell_of_the_dead(control)
        if control in ready:
            name, streams, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, _NUM_STREAMS)
            if not name:
                sys.exit()
            pid = _fork()
            if not pid:
                break
            for descriptor in streams:
                os.close(descriptor)
            _tell_of_the_living(control, pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in (control, bell, ringer):
        end.close()
    os.setsid()
    for standard, descriptor in enumerate(streams):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    show_name(name.decode())


def show_name(name: str) -> None:
    """Have `top` and `ps -o comm` show this worker's name, on systems with a /proc."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"ppd-{name}")


def _fork() -> int:
    with warnings.catch_warnings():  # about threads, which are BLAS libraries': these expect forks
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell_of_the_living(control: socket.socket, pid: int) -> None:
    descriptor = os.pidfd_open(pid)  # it cannot be another process': only this one reaps it
    with contextlib.suppress(BrokenPipeError):
        socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [descriptor])
    os.close(descriptor)


def _tell_of_the_dead(control: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            answer = {"pid": ended[0], "exit_code": os.waitstatus_to_exitcode(ended[1])}
            with contextlib.suppress(BrokenPipeError):
                control.send(json.dumps(answer).encode())
