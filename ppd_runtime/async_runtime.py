"""`AsyncPPDRuntime`: a runtime for programs with an event loop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from ppd_runtime.config import UNSET, RuntimeConfig
from ppd_runtime.methods.base import Generation, TextGenerator
from ppd_runtime.methods.batch import exhaust
from ppd_runtime.methods.chat import Messages, options_of
from ppd_runtime.methods.prompts import Prompt, Prompts
from ppd_runtime.results import GenerationResult, TokenEvent
from ppd_runtime.runtime import PPDRuntime
from ppd_runtime.sampling_params import SamplingParams, sampling_from
from ppd_runtime.settings import takes_settings

Decoder = TypeVar("Decoder", bound=TextGenerator)


class AsyncDecoding(Generic[Decoder]):
    """Any way of decoding for an event loop: its requests run in threads, as many at once as it takes.

    A request whose task is cancelled ends within a token; one that still waits for its turn never begins.
    """

    def __init__(self, generator: Decoder) -> None:
        self.generator = generator

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.generator.max_requests, "ppd-request")

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
        results = await together([self.finish(request) for request in requests])
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
        prompt = self.generator.chat_prompt(messages, chat_template, **options_of(settings))
        n = settings.pop("n", None)
        params = self.generator.chat_params(sampling_from(params, settings))
        return await self.generate(prompt, params, n=n, add_special_tokens=False)

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
        return self.follow(self.generator.stream(prompt, params, **told, **settings))

    def follow(self, generation: Generation) -> "AsyncGeneration":
        """Run a request, and give its events."""
        return AsyncGeneration(generation, self._threads)

    async def finish(self, generation: Generation) -> GenerationResult:
        """Run a request to its end."""
        try:
            await asyncio.wrap_future(self._threads.submit(exhaust, generation))
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation.result

    async def close(self) -> None:
        """Stop what runs, and close the generator; a second call does nothing."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def end_threads(self) -> None:
        """Take no further requests; the generator stays open."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _close(self) -> None:
        self.generator.close()
        self.end_threads()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def together(works: Sequence[Coroutine[Any, Any, GenerationResult]]) -> list[GenerationResult]:
    """The results of all; if one fails or this is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class AsyncGeneration(AsyncIterator[TokenEvent]):
    """A generation in progress: `async for` over its events, then read `result`.

    Dropped in the middle, as by a task that is cancelled between two events, it ends within a token.
    """

    def __init__(self, generation: Generation, threads: ThreadPoolExecutor) -> None:
        self._generation, self._over = generation, False
        self._arrived: asyncio.Queue[TokenEvent | BaseException | None] = asyncio.Queue()
        told = asyncio.get_running_loop(), self._arrived  # the thread knows nothing of this object
        self._work = threads.submit(_hand_on, generation, *told)

    def __del__(self) -> None:
        self._generation.cancel()
        if hasattr(self, "_work"):
            self._work.cancel()

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
        if item is not None:
            raise item
        raise StopAsyncIteration

    @property
    def result(self) -> GenerationResult:
        """The finished generation; raises RuntimeError while events are left."""
        return self._generation.result

    def cancel(self) -> None:
        """End within a token; events go on until then."""
        if self._work.cancel():  # its turn had not come
            self._arrived.put_nowait(None)
        self._generation.cancel()

    async def aclose(self) -> None:
        """Cancel it, if it has not finished, and wait until it has ended."""
        self.cancel()
        async for _ in self:
            pass


def _hand_on(
    generation: Generation,
    loop: asyncio.AbstractEventLoop,
    arrived: "asyncio.Queue[TokenEvent | BaseException | None]",
) -> None:
    """In a thread, hand each event and the end to a loop; a closed loop wants no more."""
    try:
        end: BaseException | None = None
        try:
            for event in generation:
                loop.call_soon_threadsafe(arrived.put_nowait, event)
        except Exception as error:  # noqa: BLE001 (who awaits the next event gets it)
            end = error
        loop.call_soon_threadsafe(arrived.put_nowait, end)
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
