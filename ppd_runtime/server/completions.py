"""`/v1/completions` and `/v1/chat/completions`: from a request to its answer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from transformers import PreTrainedTokenizerBase

from ppd_runtime.async_runtime import AsyncDecoding
from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.chat import has_template, template_of
from ppd_runtime.methods.chat_turn import ChatTurn
from ppd_runtime.methods.generation import Generation, with_seeds
from ppd_runtime.replies.reading import ReplyReading
from ppd_runtime.request_error import RequestError
from ppd_runtime.results import GenerationResult, Live
from ppd_runtime.server.admission import Admission
from ppd_runtime.server.answers import Answer, AnswerForm, Asked
from ppd_runtime.server.conversations import ChatMessage, WithTools, turn_of
from ppd_runtime.server.errors import GONE, ApiError, JsonResponse, refused
from ppd_runtime.server.infill import infill_ids
from ppd_runtime.server.metrics import Metrics
from ppd_runtime.server.requests import ChatRequest, CompletionRequest, Sampling, StreamOptions
from ppd_runtime.server.settings import ServerSettings
from ppd_runtime.server.timeline import layout_of
from ppd_runtime.server.token_texts import text_of

logger = logging.getLogger(__name__)
Done = TypeVar("Done")
_TEXT_THREADS = 4
_MOST_NEW_TOKENS = 4096  # if a chat names none, and the model has no last position
_LEAST_NEW_TOKENS = 256  # if it names none, and its prompt leaves fewer of its share of the room


MakeAnswer: TypeAlias = Callable[[Asked, PreTrainedTokenizerBase], AnswerForm]
"""Makes the form of an answer from what it depends on and the model's tokenizer."""


class Choices(NamedTuple):
    """A request's choices, checked and encoded, each with the text that its answer begins with."""

    generations: list[Generation]
    echoes: list[str]
    reading: ReplyReading | None = None
    """How the replies of a chat are read; None: their text is the answer."""


class Service:
    """Answers requests for text by one generator; what the server's paths share."""

    def __init__(self, generator: TextGenerator, settings: ServerSettings) -> None:
        self.generator, self.decoding = generator, AsyncDecoding(generator)
        self.model = settings.served_model_name or generator.info.name
        self.metrics = Metrics(self.model, generator.queue)
        self.admission = Admission(generator.queue, settings.max_waiting, self.metrics)
        self.chat_template, self.reply_formats = template_of(settings.chat_template), settings.reply_formats
        self._timeout_s = settings.request_timeout_s
        self._texts = ThreadPoolExecutor(_TEXT_THREADS, "ppd-text")

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return has_template(self.generator.tokenizer, self.chat_template)

    def end_threads(self) -> None:
        """Take no further requests."""
        self.decoding.end_threads()
        self._texts.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served."""
        if name not in (None, self.model):
            message = f"model={name!r:.200}: this server has {self.model!r}, ask for that"
            raise ApiError(404, message, "model", "model_not_found")

    async def in_thread(self, work: Callable[[], Done]) -> Done:
        """What `work` gives, which makes tokens of texts or the reverse: megabytes take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def tokens_of(self, asked: WithTools, messages: list[ChatMessage]) -> list[int]:
        """The token ids in which the model reads a conversation; raises ApiError as `chat` does."""
        try:
            return await self.in_thread(lambda: self.generator.prompt_ids(self._turn(asked, messages).prompt, False))
        except ValueError as error:
            raise refused(error, "messages") from error

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        self.check_model(asked.model)
        most_are = "n" if asked.n > asked.number_of_prompts else "prompt"
        self.admission.check_number(asked.number_of_prompts * asked.n, most_are)
        try:
            prompts = asked.prompts()
        except ValueError as error:
            raise refused(error) from error
        return await self._answer(asked, request, len(prompts), lambda: self._prepared(asked, prompts))

    async def chat(self, asked: ChatRequest, request: Request, form: MakeAnswer = Answer) -> Response:
        """Answer a conversation, in OpenAI's form of chats or another one."""
        self.check_model(asked.model)
        return await self._answer(asked, request, 1, lambda: self._prepared_chat(asked), form)

    async def _answer(
        self,
        asked: Sampling,
        request: Request,
        prompts: int,
        prepare: "Callable[[], Choices]",
        make_answer: MakeAnswer = Answer,
    ) -> Response:
        with ExitStack() as room:
            places = self.admission.enter(prompts * asked.n)
            room.callback(self.admission.leave, places)
            try:
                generations, echoes, reading = await self.in_thread(prepare)
            except ValueError as error:
                about = "messages" if isinstance(asked, ChatRequest) else "prompt"
                raise refused(asked.in_own_words(error), about) from error
            for generation, place in zip(generations, places, strict=True):
                generation.place = place
            sizes = [generation.prompt_tokens for generation in generations]
            wanted = asked.logprobs_wanted is not None
            chat, most = isinstance(asked, ChatRequest), asked.most_tokens
            options, layout = asked.stream_options or StreamOptions(), None
            if asked.live == Live.PASSES:
                layout = layout_of(self.generator)
            form = Asked(
                chat, self.model, echoes, sizes, asked.n, options, most, wanted, self.generator.shape, layout, reading
            )
            answer = make_answer(form, self.generator.tokenizer)
            if asked.stream:
                return EventStream(self, generations, answer, form, asked, room.pop_all())
            self.admission.check_open()
            try:
                work = self.decoding.results(generations, self.admission.note)
                results = await while_connected(request.receive, work)
            except ClientGone:
                return Response(status_code=GONE)
            except RequestError as error:
                if not error.fault_of_form:
                    raise
                raise asked.form_failed(error) from error
        if not wanted:
            return JsonResponse(answer.whole(results))
        return JsonResponse(await self.in_thread(lambda: answer.whole(results)))  # a prompt's tokens take seconds

    def _prepared(self, asked: CompletionRequest, prompts: "Sequence[str | list[int]]") -> "Choices":
        special_tokens = asked.add_special_tokens is not False
        wanted = [self._with_suffix(asked, prompt, special_tokens) for prompt in prompts]
        generations = [one for prompt in wanted for one in self._generations(asked, prompt, special_tokens)]
        echoes = [self._text_of(prompt) if asked.echo else "" for prompt in prompts]
        return Choices(generations, [text for text in echoes for _ in range(asked.n)])

    def _with_suffix(self, asked: CompletionRequest, prompt: str | list[int], special_tokens: bool) -> str | list[int]:
        if not asked.suffix:
            return prompt
        tokenizer = self.generator.tokenizer
        ids = tokenizer.encode(prompt, add_special_tokens=special_tokens) if isinstance(prompt, str) else prompt
        return infill_ids(ids, asked.suffix, tokenizer)

    def _turn(self, asked: WithTools, messages: list[ChatMessage]) -> ChatTurn:
        return turn_of(messages, asked, self.generator, self.chat_template, self.reply_formats)

    def _prepared_chat(self, asked: ChatRequest) -> "Choices":
        turn = self._turn(asked, asked.messages)
        generations = self._generations(asked, turn.prompt, bool(asked.add_special_tokens), turn)
        return Choices(generations, [""] * asked.n, turn.reading)

    def _generations(
        self, asked: Sampling, prompt: str | list[int], special_tokens: bool, turn: ChatTurn | None = None
    ) -> list[Generation]:
        """A request for each of a prompt's choices."""
        ids = self.generator.prompt_ids(prompt, special_tokens) if isinstance(prompt, str) else prompt
        usual = self.generator.defaults.temperature
        params = asked.sampling(self._most_tokens(asked, len(ids)), self._timeout_s, usual)
        if turn is not None:
            params = self.generator.chat_params(params, turn)
        shown = frozenset[int]() if turn is None else turn.shown
        return [self.generator.request(ids, seeded, asked.live, shown=shown) for seeded in with_seeds(params, asked.n)]

    def _most_tokens(self, asked: Sampling, prompt_size: int) -> int:
        if asked.most_tokens is not None:
            return max(asked.most_tokens, 1)
        room, positions = self.generator.room, self.generator.info.max_positions
        most = prompt_size + _MOST_NEW_TOKENS if positions is None else positions
        if room is not None:
            most = min(most, room.most, max(room.share, prompt_size + _LEAST_NEW_TOKENS))
        return max(most - prompt_size, 1)

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else text_of(prompt, self.generator.tokenizer)


class EventStream(Response):
    """An answer as server-sent events, each as soon as it is known; it ends when the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        generations: Sequence[Generation],
        answer: AnswerForm,
        form: Asked,
        asked: Sampling,
        room: ExitStack,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._generations, self._answer, self._form = service, generations, answer, form
        self._asked, self._room = asked, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await _sent(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._send_events(send, scope["state"]["request_id"]))
        except ClientGone:
            return
        finally:
            self._room.close()

    async def _send_events(self, send: Send, request_id: str) -> None:
        answer, results = self._answer, dict[int, GenerationResult]()

        async def tell(chunk: dict[str, Any]) -> None:
            await _sent(send, {"type": "http.response.body", "body": answer.event(chunk), "more_body": True})

        try:
            for number in range(len(self._generations)):
                for chunk in answer.opening(number):
                    await tell(chunk)
            admission, decoding = self._service.admission, self._service.decoding
            admission.check_open()
            async for number, event in decoding.events(self._generations, admission.note):
                if isinstance(event, GenerationResult):
                    results[number] = event
                    chunks = answer.closing(number, event)
                else:
                    chunks = answer.piece(number, event) if self._form.most_tokens != 0 else []
                for chunk in chunks:
                    await tell(chunk)
            for chunk in answer.ending([results[number] for number in range(len(results))]):
                await tell(chunk)
        except ApiError as error:  # the status is told already
            await tell(answer.failure(error))
        except (RuntimeError, OSError) as error:
            if isinstance(error, RequestError) and error.fault_of_form:
                await tell(answer.failure(self._asked.form_failed(error)))
            else:
                logger.error("request %s failed: %s", request_id, error)
                await tell(answer.failure(ApiError(500, str(error))))
        await _sent(send, {"type": "http.response.body", "body": answer.last, "more_body": False})


class ClientGone(Exception):
    """The answer is no longer waited for."""


async def _sent(send: Send, message: Message) -> None:
    """Send a part of an answer; raises ClientGone if the connection has gone."""
    try:
        await send(message)
    except OSError as error:
        raise ClientGone from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Done]) -> Done:
    """The result of `work`, which is cancelled if the client goes away.

    Raises:
        ClientGone: it has.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client goes away; the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
