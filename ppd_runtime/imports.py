"""Heavy imports in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Look for no garbage meanwhile, nor later in what is there by then: that is a third of an import's time.

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
