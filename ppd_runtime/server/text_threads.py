"""Threads in which texts become tokens and tokens texts: megabytes take seconds, and no probe waits for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 4

Done = TypeVar("Done")


class TextThreads:
    """A server's threads; more work waits its turn."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "ppd-text")

    async def run(self, work: Callable[[], Done]) -> Done:
        """What `work` gives."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def end(self) -> None:
        """Take no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
