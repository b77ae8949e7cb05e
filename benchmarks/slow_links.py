"""A delay on every message from worker to worker, where plain processes of this host talk over Unix sockets.

A relay takes the place of each worker's socket and hands on what comes a while later, in order.
"""

import contextlib
import select
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_LOOK_S = 0.1
_MOST_BYTES = 2**20


@contextlib.contextmanager
def found_sockets() -> Iterator[Path]:
    """Temporary folders of the block's programs lie in this one, and so do the sockets of their workers."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="ppd", dir="/tmp") as folder:  # a socket's path has to be short
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def slow_links(folder: Path, delay_s: float) -> Iterator[None]:
    """Streams to workers below a folder that are opened in the block are `delay_s` slower, one way.

    Those to the client are as quick as before, and so are those that were open.

    Raises:
        ValueError: where no worker listens.
    """
    paths = [path for path in folder.glob("*/worker-*") if path.is_socket()]
    if not paths:
        raise ValueError("no sockets of workers: a delay is for launcher='processes' on one host")
    relay = _Relay(paths, delay_s)
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        relay.over.set()
        thread.join()


class _Relay:
    """Hands on what comes for the workers at `paths`."""

    def __init__(self, paths: list[Path], delay_s: float) -> None:
        self.over, self._delay_s = threading.Event(), delay_s
        self._real: dict[socket.socket, Path] = {}  # by the listener in its place
        self._onward: dict[socket.socket, socket.socket] = {}  # by the connection that came
        self._waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        for path in paths:
            real = path.with_name(f"real-{path.name}")
            path.rename(real)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen()
            self._real[listener] = real

    def run(self) -> None:
        """Until it is over."""
        while not self.over.is_set():
            due = self._waiting[0][0] - time.perf_counter() if self._waiting else _LOOK_S
            ready, _, _ = select.select([*self._real, *self._onward], [], [], max(0.0, min(due, _LOOK_S)))
            for came in ready:
                self._take(came)
            while self._waiting and self._waiting[0][0] <= time.perf_counter():
                _, to, piece = self._waiting.popleft()
                with contextlib.suppress(OSError):  # the worker has gone
                    to.sendall(piece)
        for each in (*self._real, *self._onward, *self._onward.values()):
            each.close()

    def _take(self, came: socket.socket) -> None:
        if real := self._real.get(came):
            connection, _ = came.accept()
            self._onward[connection] = onward = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            onward.connect(str(real))
        elif piece := came.recv(_MOST_BYTES):
            self._waiting.append((time.perf_counter() + self._delay_s, self._onward[came], piece))
        else:
            self._onward.pop(came).close()
            came.close()
