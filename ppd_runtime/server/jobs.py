"""A request at work: its choices run in the generator, and end where the client goes away."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ppd_runtime.async_runtime import AsyncDecoding, Followed, together
from ppd_runtime.methods.base import Generation, TextGenerator
from ppd_runtime.results import GenerationResult, TokenEvent
from ppd_runtime.server.admission import Admission
from ppd_runtime.server.metrics import Metrics

Done = TypeVar("Done")
Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The answer is no longer waited for."""


@dataclass
class Timed:
    """When a choice came, and when its turn did."""

    came: float
    began: float | None = None


class Jobs:
    """Runs choices and counts them."""

    def __init__(self, decoding: AsyncDecoding[TextGenerator], admission: Admission, metrics: Metrics) -> None:
        self._decoding, self._admission, self._metrics = decoding, admission, metrics
        self._live = set[Generation]()
        self._turn = threading.Lock()

    def cancel_all(self) -> None:
        """Have what runs end within a token, with what there is."""
        for generation in self._live:
            generation.cancel()

    async def finish_all(self, generations: Sequence[Generation]) -> list[GenerationResult]:
        """All choices' results, in order."""
        return await together([self._finish(generation) for generation in generations])

    async def _finish(self, generation: Generation) -> GenerationResult:
        timed = self._arrive(generation)
        try:
            result = await self._decoding.finish(generation, lambda: self._begin(generation, timed))
        finally:
            self._leave(generation, timed)
        self._note(result, timed)
        return result

    async def events(
        self, generations: Sequence[Generation], ended: Callable[[], None]
    ) -> AsyncGenerator[list[tuple[int, TokenEvent | GenerationResult]], None]:
        """Each choice's number with its events, and its result behind them: all that have come, once some have.

        `ended` is called when all choices have, however slowly their events are read.
        """
        arrived: asyncio.Queue[tuple[int, TokenEvent | GenerationResult | Exception]] = asyncio.Queue()
        running = dict[int, Timed]()

        def end(number: int) -> None:
            """Once for each choice."""
            if timed := running.pop(number, None):
                self._leave(generations[number], timed)
                if not running:
                    ended()

        def tell(number: int, item: TokenEvent | Exception | None) -> None:
            """In the loop, of one that runs; of others nothing more is wanted."""
            if number not in running:
                return
            if isinstance(item, TokenEvent):
                arrived.put_nowait((number, item))
                return
            if item is None:
                self._note(generations[number].result, running[number])
            arrived.put_nowait((number, generations[number].result if item is None else item))
            end(number)

        def follow(number: int, generation: Generation) -> Followed:
            timed = running[number]
            return self._decoding.follow(generation, partial(tell, number), lambda: self._begin(generation, timed))

        running |= {number: self._arrive(generation) for number, generation in enumerate(generations)}
        followed = [follow(number, generation) for number, generation in enumerate(generations)]
        left = len(followed)
        try:
            while left:
                number, item = await arrived.get()
                batch = list[tuple[int, TokenEvent | GenerationResult]]()
                while not isinstance(item, Exception):
                    left -= isinstance(item, GenerationResult)
                    batch.append((number, item))
                    if arrived.empty():
                        break
                    number, item = arrived.get_nowait()
                if batch:
                    yield batch
                if isinstance(item, Exception):
                    raise item
        finally:
            for number, one in enumerate(followed):
                end(number)
                one.cancel()

    def _arrive(self, generation: Generation) -> Timed:
        self._live.add(generation)
        self._metrics.waiting.inc()
        return Timed(time.monotonic())

    def _begin(self, generation: Generation, timed: Timed) -> None:
        """In the choice's own thread, when its turn has come; its client may have gone by then."""
        with self._turn:
            if generation not in self._live:
                return
            self._admission.check_open()
            timed.began = time.monotonic()
            self._metrics.waiting.dec()
            self._metrics.running.inc()

    def _leave(self, generation: Generation, timed: Timed) -> None:
        with self._turn:
            self._live.discard(generation)
            (self._metrics.waiting if timed.began is None else self._metrics.running).dec()

    def _note(self, result: GenerationResult, timed: Timed) -> None:
        ended, began = time.monotonic(), timed.began or timed.came
        self._metrics.note(result, began - timed.came, ended - timed.came)
        self._admission.note_time(ended - began)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Done]) -> Done:
    """What `work` gives; it is cancelled where the client goes away meanwhile.

    Raises:
        ClientGone: it has.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client goes away; the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
