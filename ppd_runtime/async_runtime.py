"""`AsyncPPDRuntime`: a runtime for programs with an event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from ppd_runtime.launch.supervisor import CLOSED
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.chat import Messages
from ppd_runtime.methods.generation import Generation
from ppd_runtime.methods.prompts import Prompt, Prompts
from ppd_runtime.results import GenerationResult, TokenEvent
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling.params import SamplingParams, sampling_from
from ppd_runtime.settings.config import UNSET, RuntimeConfig
from ppd_runtime.settings.fields import takes_settings

Decoder = TypeVar("Decoder", bound=TextGenerator)
Told: TypeAlias = TokenEvent | GenerationResult | Exception
"""An event, if they are wanted, or at the end the result or an error."""


class AsyncDecoding(Generic[Decoder]):
    """Any way of decoding for an event loop: requests that run have threads, requests that wait need none.

    A request whose task is cancelled ends within a token; one that still waits for its turn never begins.
    """

    def __init__(self, generator: Decoder) -> None:
        self.generator = generator
        self._threads, self._is_closed = ThreadPoolExecutor(generator.max_requests, "ppd-request"), False

    async def generate(
        self,
        prompt: Prompt | Prompts,
        params: SamplingParams | None = None,
        *,
        n: int | None = None,
        add_special_tokens: bool = True,
        **settings: Any,
    ) -> Any:
        """Like `PPDRuntime.generate`: one result, or a list of them for `n` and for several prompts."""
        requests, alone = self.generator.requests(prompt, sampling_from(params, settings), n, add_special_tokens)
        results = await self.results(requests)
        return results[0] if alone else results

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        chat_template: str | Path | None = None,
        **settings: Any,
    ) -> Any:
        """Like `PPDRuntime.chat`."""
        turn, requests, alone = self.generator.chat_requests(messages, params, chat_template, settings)
        results = [turn.answered(result) for result in await self.results(requests)]
        return results[0] if alone else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        boundaries: bool = False,
        passes: bool = False,
        **settings: Any,
    ) -> "AsyncGeneration":
        """Like `PPDRuntime.stream`, for `async for`. The call sends the request at once, or queues it."""
        told = {"add_special_tokens": add_special_tokens, "boundaries": boundaries, "passes": passes}
        return AsyncGeneration(self.generator.stream(prompt, params, **told, **settings), self)

    def hand_on(self, generation: Generation, tell: Callable[[Told], object]) -> None:
        """Run a request at its turn; `tell` gets each event of a live one, then the end, in the loop of this call."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        work = partial(_hand_on, generation, asyncio.get_running_loop(), tell)
        try:
            generation.line_up(lambda: self._threads.submit(work) if generation.has_turn else work())
        except BaseException:
            generation.close()
            raise

    async def events(
        self, generations: Sequence[Generation], at_end: Callable[[Generation], object] = lambda _: None
    ) -> AsyncGenerator[tuple[int, TokenEvent | GenerationResult], None]:
        """Run requests: each one's number with its events as they come, if it is live, and then with its result.

        `at_end` is called before a result is given. If a request or `at_end` fails, all requests are cancelled.
        """
        arrived: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        left = len(generations)
        try:
            for number, generation in enumerate(generations):
                self.hand_on(generation, partial(_put, arrived, number))
            while left:
                number, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, GenerationResult):
                    at_end(generations[number])
                    left -= 1
                yield number, item
        finally:
            for generation in generations:
                generation.cancel()

    async def results(
        self, generations: Sequence[Generation], at_end: Callable[[Generation], object] = lambda _: None
    ) -> list[GenerationResult]:
        """Run requests to their ends, as `events` does."""
        async for _ in self.events(generations, at_end):
            pass
        return [generation.result for generation in generations]

    async def close(self) -> None:
        """Stop what runs, and close the generator; a second call does nothing."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def end_threads(self) -> None:
        """Take no further requests, and end those that wait; the generator stays open."""
        self._is_closed = True
        self.generator.queue.cancel_waiting()
        self._threads.shutdown(wait=False)

    def _close(self) -> None:
        self.end_threads()
        self.generator.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncGeneration(AsyncIterator[TokenEvent]):
    """A generation in progress: `async for` over its events, then read `result`.

    Dropped in the middle, as by a task that is cancelled between two events, it ends within a token.
    """

    def __init__(self, generation: Generation, decoding: AsyncDecoding[Any]) -> None:
        self._generation, self._over = generation, False
        self._arrived: asyncio.Queue[Told] = asyncio.Queue()
        decoding.hand_on(generation, self._arrived.put_nowait)  # which knows nothing of this object

    def __del__(self) -> None:
        self._generation.cancel()

    async def __anext__(self) -> TokenEvent:
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._arrived.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, TokenEvent):
            return item
        self._over = True
        self._arrived.put_nowait(item)  # for `aclose` beside another task that waits for an event
        if isinstance(item, Exception):
            raise item
        raise StopAsyncIteration

    @property
    def result(self) -> GenerationResult:
        """The finished generation; raises RuntimeError while events are left."""
        return self._generation.result

    def cancel(self) -> None:
        """End within a token; events go on until then."""
        self._generation.cancel()

    async def aclose(self) -> None:
        """Cancel it, if it has not finished, and wait until it has ended."""
        self.cancel()
        async for _ in self:
            pass


def _put(arrived: "asyncio.Queue[tuple[int, Told]]", number: int, item: Told) -> None:
    arrived.put_nowait((number, item))


def _hand_on(generation: Generation, loop: asyncio.AbstractEventLoop, tell: Callable[[Told], object]) -> None:
    """Run a request to its end; a closed loop wants no more."""
    try:
        try:
            for event in generation:
                if generation.live:
                    loop.call_soon_threadsafe(tell, event)
            end: Told = generation.result
        except Exception as error:  # noqa: BLE001 (who awaits the next event gets it)
            end = error
        loop.call_soon_threadsafe(tell, end)
    except RuntimeError:
        generation.cancel()
    finally:
        generation.close()


@takes_settings(RuntimeConfig)
class AsyncPPDRuntime(AsyncDecoding[PPDRuntime]):
    """`PPDRuntime` for programs with an event loop: `await generate(…)`, `async for event in stream(…)`.

    Args:
        settings: those of `RuntimeConfig` by name.
        config: the same as one object, in place of them.
    """

    def __init__(self, model: str | Path = UNSET, *, config: RuntimeConfig | None = None, **settings: Any) -> None:
        super().__init__(PPDRuntime(model, config=config, **settings))

    async def start(self) -> None:
        """Start the workers and wait until they have loaded their layers; a second call does nothing."""
        await asyncio.get_running_loop().run_in_executor(None, self.generator.start)

    async def __aenter__(self) -> "AsyncPPDRuntime":
        await self.start()
        return self
