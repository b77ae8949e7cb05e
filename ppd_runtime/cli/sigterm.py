"""SIGTERM ends `ppd` at any moment, also as process 1 of a container, which gets no signal that it does not handle."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from ppd_runtime.cli.exit_codes import TERMINATED


def end_by_sigterm() -> None:
    """Have it end the program at once from now on, with exit code 143."""
    if _is_here() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


@contextlib.contextmanager
def closed_by_sigterm() -> Iterator[None]:
    """Have it leave the block as an exception does, with that exit code, and a second one end the program at once.

    A handler that the program has of its own stays.
    """
    before = signal.getsignal(signal.SIGTERM)
    if not _is_here() or before not in (signal.SIG_DFL, _end):
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except Exception:
        if signal.getsignal(signal.SIGTERM) is _end:  # it has come, and a library has made another exception of it
            sys.exit(TERMINATED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_here() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, _end)
    sys.exit(TERMINATED)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(TERMINATED)  # workers end where they are left alone, and so does what clears up
