"""Answers in OpenAI's forms, whole and in pieces; each choice has a `ppd` object besides."""

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from ppd_runtime.client.ending import CANCELLED, TIMEOUT
from ppd_runtime.replies.reading import ReplyReading
from ppd_runtime.results import GenerationResult, News, TokenEvent
from ppd_runtime.sampling.logprobs import TokenLogprobs
from ppd_runtime.server.errors import ApiError, as_json
from ppd_runtime.server.replies import StreamedReply
from ppd_runtime.server.requests import StreamOptions
from ppd_runtime.server.timeline import as_told
from ppd_runtime.server.token_texts import TokenTexts


class Asked(NamedTuple):
    """What the form of an answer depends on."""

    chat: bool
    model: str
    echoes: Sequence[str]
    """The prompt's text before each choice's; empty if not wanted."""
    prompt_tokens: Sequence[int]
    """Prompt tokens of each choice."""
    n: int
    """Choices for each prompt."""
    stream_options: StreamOptions
    most_tokens: int | None
    """Most new tokens in the answer; 0: a token was made, and none is wanted."""
    logprobs: bool
    shape: Mapping[str, Any]
    """How the generator decodes."""
    layout: dict[str, Any] | None
    """Told at a stream's beginning, if its timeline is wanted."""
    reading: ReplyReading | None = None
    """How a chat's replies are read; None: their text is the answer."""


class AnswerForm(Protocol):
    """An API's form of one request's answer, whole and as a stream's events."""

    id: str
    last: bytes
    """What a stream ends with."""

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer of a request without streaming."""

    def opening(self, number: int) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""

    def piece(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        """A token, as soon as it is certain."""

    def closing(self, number: int, result: GenerationResult) -> list[dict[str, Any]]:
        """Why a choice ended, and its counts, with the text that was held back for more to come."""

    def ending(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """What follows when all choices have ended."""

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The event of an error in a stream."""

    def event(self, content: dict[str, Any]) -> bytes:
        """An event as it is sent."""


class Answer:
    """One completion's or chat's answer; implements `AnswerForm`."""

    last = b"data: [DONE]\n\n"

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._told, self._new = Counter[int](), Counter[int]()  # characters and tokens of each choice's stream
        self._texts = defaultdict[int, TokenTexts](lambda: TokenTexts(tokenizer))  # of each choice's stream
        self._replies = {} if asked.reading is None else defaultdict[int, StreamedReply](self._streamed_reply)
        kind, self._object = ("chatcmpl", "chat.completion") if asked.chat else ("cmpl", "text_completion")
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self._began_ns = time.time_ns()
        self._head = {"id": self.id, "created": self._began_ns // 10**9, "model": asked.model}

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The answer of a request without streaming."""
        choices = [self._choice(number, result) for number, result in enumerate(results)]
        return {**self._head, "object": self._object, "choices": choices, "usage": self._usage(results)}

    def opening(self, number: int) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""
        told = {"ppd": self._asked.layout} if self._asked.layout else {}
        if self._asked.chat:
            return [self._chunk(number, {"delta": {"role": "assistant", "content": ""}, **told})]
        echo = self._asked.echoes[number]
        return [self._chunk(number, {"text": echo, **told})] if echo or told else []

    def piece(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        """A token, as soon as it is certain."""
        hit = {} if event.hit is None else {"hit": event.hit}
        ppd = {**hit, **self._news(number, event.news)}
        told: dict[str, Any] = {"ppd": ppd} if ppd else {}
        self._told[number] += len(event.text)
        self._new[number] += 1
        if event.logprobs is not None:
            told["logprobs"] = self._logprobs(self._texts[number], [event.logprobs])
        if self._asked.reading is not None:
            return [self._chunk(number, {"delta": self._replies[number].push(event.text), **told})]
        return [self._chunk(number, {**self._text(event.text, "delta"), **told})]

    def closing(self, number: int, result: GenerationResult) -> list[dict[str, Any]]:
        """Why a choice ended, and its counts, with the text that was held back for more to come."""
        rest = self._text_of(result)[self._told[number] :]
        text, called = self._text(rest, "delta") if rest or not self._asked.chat else {"delta": {}}, False
        if self._asked.reading is not None:
            reply = self._replies[number]
            text, called = {"delta": reply.finish(rest)}, reply.calls > 0
        ppd = {**ppd_of(result, self._asked.shape), **self._news(number, result.news)}
        return [self._chunk(number, {**text, "ppd": ppd}, self._reason(result, called))]

    def _news(self, number: int, news: News) -> dict[str, Any]:
        return as_told(news, self._asked.prompt_tokens[number], self._began_ns)

    def ending(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """The usage, if it is wanted."""
        if not self._asked.stream_options.include_usage:
            return []
        return [{**self._head, "object": self._chunks, "choices": [], "usage": self._usage(results)}]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Implements `AnswerForm.failure`."""
        return error.body

    def event(self, content: dict[str, Any]) -> bytes:
        """Implements `AnswerForm.event`."""
        return b"data: " + as_json(content) + b"\n\n"

    @property
    def _chunks(self) -> str:
        return "chat.completion.chunk" if self._asked.chat else "text_completion"

    def _chunk(self, number: int, choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choices = [{"index": number, "logprobs": None, "finish_reason": reason, **choice}]
        usage = {"usage": self._usage_so_far(number)} if self._asked.stream_options.include_usage else {}
        return {**self._head, "object": self._chunks, "choices": choices, **usage}

    def _usage_so_far(self, number: int) -> dict[str, int] | None:
        if not self._asked.stream_options.continuous_usage_stats:
            return None
        return _counted(self._asked.prompt_tokens[number], self._new[number])

    def _choice(self, number: int, result: GenerationResult) -> dict[str, Any]:
        echo, logprobs = self._asked.echoes[number], None
        if self._asked.logprobs:
            echo, logprobs = self._all_logprobs(echo, result)
        text, called = self._text(echo + self._text_of(result), "message"), False
        if self._asked.reading is not None:
            message = self._asked.reading.message_of(result.text)
            text, called = {"message": {"refusal": None, **message.to_dict()}}, bool(message.tool_calls)
        return {
            "index": number,
            **text,
            "logprobs": logprobs,
            "finish_reason": self._reason(result, called),
            "ppd": ppd_of(result, self._asked.shape),
        }

    def _text_of(self, result: GenerationResult) -> str:
        return "" if self._asked.most_tokens == 0 else result.text

    def _reason(self, result: GenerationResult, called: bool) -> str:
        reason = "length" if self._asked.most_tokens == 0 else reason_told(result)
        return "tool_calls" if called and reason == "stop" else reason

    def _streamed_reply(self) -> StreamedReply:
        assert self._asked.reading is not None
        return StreamedReply(self._asked.reading)

    def _all_logprobs(self, echo: str, result: GenerationResult) -> tuple[str, dict[str, Any]]:
        """The prompt by its tokens; and log-probabilities, with `echo` the prompt's first."""
        noted = (result.logprobs or ()) if self._asked.most_tokens != 0 else ()
        if result.prompt_logprobs is None:
            return echo, self._logprobs(TokenTexts(self._tokenizer), noted)
        prompt = TokenTexts(self._tokenizer, prompt=echo)
        before = prompt.old_logprobs(zip(result.prompt_ids, (None, *result.prompt_logprobs), strict=True))
        echo = prompt.finish()
        behind = self._logprobs(TokenTexts(self._tokenizer, offset=len(echo)), noted)
        return echo, {name: [*values, *behind[name]] for name, values in before.items()}

    def _logprobs(self, texts: TokenTexts, noted: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if self._asked.chat:
            return texts.chat_logprobs(noted)
        return texts.old_logprobs((one.token_id, one) for one in noted)

    def _text(self, text: str, member: str) -> dict[str, Any]:
        if not self._asked.chat:
            return {"text": text}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {member: message if member == "message" else {"content": text}}

    def _usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        new = 0 if self._asked.most_tokens == 0 else sum(len(result.token_ids) for result in results)
        cached = sum(result.stats.cached_tokens for result in results[:: self._asked.n])
        counts = _counted(sum(self._asked.prompt_tokens[:: self._asked.n]), new)
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def reason_told(result: GenerationResult) -> str:
    """OpenAI's word for why a text ended."""
    return "length" if result.finish_reason in ("length", TIMEOUT, CANCELLED) else "stop"


def _counted(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def ppd_of(result: GenerationResult, shape: Mapping[str, Any]) -> dict[str, Any]:
    """How a choice was decoded, by a generator of this `shape`; times in seconds."""
    stats = result.stats
    return {
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "layout": dict(shape),
        "hits": stats.hits,
        "misses": stats.misses,
        "first_boundary": list(stats.first_boundary),
        "match_rate": stats.match_rate,
        "measured_ratio": stats.measured_ratio,
        "one_process": stats.one_process,
        "latency_s": stats.latency_s,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "tokens_per_second": stats.tokens_per_second,
    }
