"""Heavy imports: in less time, and whole."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage meanwhile, nor later in what is there by then: that is a third of an import's time.

    For processes of our own: a cycle that is garbage already when this ends is never freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def whole_imports() -> Iterator[None]:
    """Let Ctrl-C wait until the imports of this block are done; a second one does not wait.

    Libraries with compiled parts, such as PyTorch, cannot be imported again after an interruption, and the program
    could not try again. A handler that the program has set for Ctrl-C is left alone.
    """
    theirs = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or theirs is not signal.default_int_handler:
        yield
        return
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, theirs)
        if len(interrupts) == 1:
            raise KeyboardInterrupt
