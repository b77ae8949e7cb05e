"""A request at work: its choices run in the generator, and end when the client goes away."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ppd_runtime.async_runtime import AsyncDecoding, AsyncGeneration, together
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
    is_over: bool = False


class Jobs:
    """Runs choices and counts them."""

    def __init__(self, decoding: AsyncDecoding[TextGenerator], admission: Admission, metrics: Metrics) -> None:
        self._decoding, self._admission, self._metrics = decoding, admission, metrics
        self._live = set[Generation]()
        self._turn = threading.Lock()

    def cancel_all(self) -> None:
        """End all choices within a token, with what there is."""
        for generation in self._live:
            generation.cancel()

    async def finish_all(self, generations: Sequence[Generation]) -> list[GenerationResult]:
        """All choices' results, in order."""
        return await together([self._finish(generation) for generation in generations])

    async def _finish(self, generation: Generation) -> GenerationResult:
        timed = self._arrive(generation)
        try:
            result = await self._decoding.finish(generation)
        finally:
            self._leave(generation, timed)
        self._note(result, timed)
        return result

    async def events(
        self, generations: Sequence[Generation], ended: Callable[[], None]
    ) -> AsyncGenerator[tuple[int, TokenEvent | GenerationResult], None]:
        """Each choice's number with its events as they come, then with its result.

        `ended` is called when all choices have ended, however slowly their events are read.
        """
        arrived: asyncio.Queue[tuple[int, TokenEvent | GenerationResult | BaseException]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._follow(number, generation, arrived))
            for number, generation in enumerate(generations)
        ]
        left = len(tasks)
        over = asyncio.gather(*tasks, return_exceptions=True)
        over.add_done_callback(lambda _: ended())
        try:
            while left:
                number, item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                left -= isinstance(item, GenerationResult)
                yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await over

    async def _follow(self, number: int, generation: Generation, arrived: "asyncio.Queue[Any]") -> None:
        timed = self._arrive(generation)
        followed: AsyncGeneration = self._decoding.follow(generation)
        try:
            async for event in followed:
                arrived.put_nowait((number, event))
            self._note(followed.result, timed)
            arrived.put_nowait((number, followed.result))
        except Exception as error:  # noqa: BLE001 (the reader of the events gets it)
            arrived.put_nowait((number, error))
        finally:
            followed.cancel()
            self._leave(generation, timed)

    def _arrive(self, generation: Generation) -> Timed:
        timed = Timed(time.monotonic())
        self._live.add(generation)
        self._metrics.waiting.inc()
        generation.on_turn(lambda: self._begin(timed))
        return timed

    def _begin(self, timed: Timed) -> None:
        """Runs in the choice's own thread, at its turn; its client may have gone by then."""
        with self._turn:
            if timed.is_over:
                return
            self._admission.check_open()
            timed.began = time.monotonic()
            self._metrics.waiting.dec()
            self._metrics.running.inc()

    def _leave(self, generation: Generation, timed: Timed) -> None:
        with self._turn:
            self._live.discard(generation)
            timed.is_over = True
            (self._metrics.waiting if timed.began is None else self._metrics.running).dec()

    def _note(self, result: GenerationResult, timed: Timed) -> None:
        ended, began = time.monotonic(), timed.began or timed.came
        self._metrics.note(result, began - timed.came, ended - timed.came)
        self._admission.note_time(ended - began)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Done]) -> Done:
    """The result of `work`, which is cancelled if the client goes away.

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
