"""What clients may ask for: OpenAI's fields, and vLLM's besides. What is not here is refused by name."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, field_validator, model_validator

from ppd_runtime.results import Live
from ppd_runtime.sampling.params import BY_CHANCE, MOST_LOGPROBS, MOST_STOPS, SamplingParams, sampling_from
from ppd_runtime.sampling.token_lists import biases
from ppd_runtime.server.body import Body
from ppd_runtime.server.conversations import Messages, WithTools
from ppd_runtime.server.errors import shown
from ppd_runtime.server.forms import Formed
from ppd_runtime.server.left_aside import ASKS_FOR_NOTHING

_LARGEST_SEED = 2**64 - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_USUAL = SamplingParams()
"""The library's defaults, which are OpenAI's except the temperature."""
_USUAL_TEMPERATURE = 1.0
"""OpenAI's default."""
_MOST_IDS = 2**21
_ASKS_CHATS_FOR_NOTHING = {
    name: values for name, values in ASKS_FOR_NOTHING.items() if name not in WithTools.model_fields
}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}]}
    ),
]


def _logit_bias(given: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict):
        raise ValueError("give an object of biases by token id")
    for token in given:
        if not (isinstance(token, str) and _TOKEN_ID.fullmatch(token)):
            raise ValueError(f"{shown(token)} is no token id, give ids as keys")
    return biases("logit_bias", {int(token): bias for token, bias in given.items()})


LogitBias = Annotated[
    Any,
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
"""Biases by token id, whose keys are texts in JSON."""


class StreamOptions(Body):
    """What a stream tells besides."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: each piece has the usage of its choice up to then."""
    include_obfuscation: Literal[False] = False

    @model_validator(mode="after")
    def _continuous_with_usage(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats=true: needs include_usage=true, give it too")
        return self


class PpdOptions(Body):
    """What a stream tells of the pipeline besides; no other server's field."""

    foreseen: bool = False
    timeline: bool = False
    """What every process computes, and what `foreseen` asks for."""


class Sampling(Formed):
    """What both kinds of completion take."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float = Field(_USUAL.presence_penalty, ge=-2, le=2)
    frequency_penalty: float = Field(_USUAL.frequency_penalty, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(None, ge=-(2**63), le=_LARGEST_SEED)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MOST_STOPS, fail_fast=True)
    ignore_eos: bool = _USUAL.ignore_eos
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ppd: PpdOptions | None = None
    add_special_tokens: bool | None = None

    usual_max_tokens: ClassVar[int | None] = 16

    @model_validator(mode="after")
    def _options_with_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            given = self.stream_options.model_dump(exclude_unset=True)
            raise ValueError(f"stream_options={given}: is for stream=true, leave it out")
        if self.ppd is not None and not self.stream:
            given = self.ppd.model_dump(exclude_unset=True)
            raise ValueError(f"ppd={given}: is for stream=true, leave it out")
        return self

    @property
    def live(self) -> Live:
        """What is to be told while it runs."""
        if not self.stream:
            return Live.NOTHING
        asked = self.ppd or PpdOptions()
        return Live.PASSES if asked.timeline else Live.BOUNDARIES if asked.foreseen else Live.TOKENS

    @property
    def logprobs_wanted(self) -> int | None:
        """Likeliest tokens whose log-probabilities are wanted, beside the chosen one's; None: none at all."""
        return None

    @property
    def prompt_logprobs_wanted(self) -> bool:
        """Whether the prompt tokens' are wanted too."""
        return False

    @property
    def most_tokens(self) -> int | None:
        """Most new tokens; None: as many as fit."""
        return self.usual_max_tokens if self.max_tokens is None else self.max_tokens

    def sampling(self, most_tokens: int, timeout_s: float, usual_temperature: float | None = None) -> SamplingParams:
        """The library's settings. The seed is random if it is absent or -1.

        `usual_temperature` is the model's, for requests without one; None: 1.

        Raises:
            ValueError: for what cannot work.
        """
        seed = BY_CHANCE if self.seed in (None, BY_CHANCE) else self.seed % 2**64
        usual = _USUAL_TEMPERATURE if usual_temperature is None else usual_temperature
        named = ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "ignore_eos")
        penalties = ("presence_penalty", "frequency_penalty", "stop", "stop_token_ids")
        settings = {name: getattr(self, name) for name in (*named, *penalties)}
        return sampling_from(
            None,
            {
                **settings,
                **self.form(),
                "temperature": usual if self.temperature is None else self.temperature,
                "max_new_tokens": most_tokens,
                "seed": seed,
                "timeout_s": timeout_s,
                "logprobs": self.logprobs_wanted,
                "prompt_logprobs": self.prompt_logprobs_wanted,
            },
        )


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompts
    suffix: str | None = None
    """The text behind the wanted one."""
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def logprobs_wanted(self) -> int | None:
        """Implements `Sampling.logprobs_wanted`."""
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> bool:
        """Implements `Sampling.prompt_logprobs_wanted`."""
        return self.echo and self.logprobs is not None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _is_a_number(cls, given: Any) -> Any:
        if given is True:
            raise ValueError(f"is a number here, of likeliest tokens: give 0 to {MOST_LOGPROBS}")
        return given

    @model_validator(mode="after")
    def _can_stream(self) -> "CompletionRequest":
        if self.suffix and self.prompt_logprobs_wanted:
            raise ValueError(f"suffix={shown(self.suffix)}: the prompt has another order, leave it or echo out")
        if self.stream and self.prompt_logprobs_wanted:
            raise ValueError("echo=True: with logprobs it is not streamed, leave echo or stream out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0: gives nothing without echo, ask for 1 or more")
        return self

    @property
    def number_of_prompts(self) -> int:
        """The number of prompts in the request."""
        alone = not isinstance(self.prompt, list) or type(next(iter(self.prompt), 0)) is int
        return 1 if alone else len(self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids.

        Raises:
            ValueError: for other values.
        """
        given = self.prompt
        if isinstance(given, str) or _are_ids(given):
            return [given]
        if isinstance(given, list) and given and all(isinstance(one, str) or _are_ids(one) for one in given):
            return given
        raise ValueError(f"prompt={shown(given)}: give a text, a list of token ids, or a list of either")


class ChatRequest(Sampling, WithTools):
    """`POST /v1/chat/completions`."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = _ASKS_CHATS_FOR_NOTHING

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    usual_max_tokens: ClassVar[int | None] = None

    @model_validator(mode="after")
    def _fits(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs}: needs logprobs=true, give it too")
        if self.max_tokens == 0:
            raise ValueError("max_tokens=0: gives nothing, ask for 1 or more")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError(f"max_tokens={self.max_tokens}: max_completion_tokens is given as well, leave one out")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        """Implements `Sampling.logprobs_wanted`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Implements `Sampling.most_tokens`."""
        return self.max_completion_tokens or super().most_tokens


class TokenizeRequest(WithTools):
    """`POST /tokenize`."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = _ASKS_CHATS_FOR_NOTHING

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _either(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            given = f"={shown(self.prompt)}" if self.prompt is not None else ""
            raise ValueError(f"prompt{given}: give one of prompt and messages")
        if self.prompt is not None and (asked := self.model_fields_set & WithTools.model_fields.keys()):
            raise ValueError(f"{min(asked)}: is for messages, leave it out")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int] = Field(max_length=_MOST_IDS, fail_fast=True)


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)
