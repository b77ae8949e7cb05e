"""What programs that hold OpenAI's own Python client send."""

from collections.abc import Callable
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "How is the weather in Paris?"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def _client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def _chat(url: str, messages: list[Any], **settings: Any) -> Any:
    return _client(url).chat.completions.create(model="tiny", messages=messages, **settings)


def _agent(url: str, **settings: Any) -> None:
    """Appends the message object of the answer and the tool's result, and asks again."""
    messages: list[Any] = [{"role": "system", "content": "You help."}, USER]
    message = _chat(url, messages, tools=[WEATHER], tool_choice="auto").choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    _chat(url, [*messages, message, result], **settings)


def _dumped(url: str) -> None:
    """An earlier answer's message as `model_dump()` gives it, nulls and all."""
    message = _chat(url, [USER], max_tokens=4).choices[0].message.model_dump()
    _chat(url, [USER, message, {"role": "user", "content": "And tomorrow?"}], max_tokens=4)


def _old_functions(url: str) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    result = {"role": "function", "name": "weather", "content": "sunny"}
    _chat(url, [USER, called, result], functions=[], max_tokens=4)


def _streamed(url: str) -> None:
    asked = {"model": "tiny", "messages": [USER], "max_completion_tokens": 4, "seed": 7}
    with _client(url).chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        list(stream)


def _parsed(url: str) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    _client(url).chat.completions.parse(model="tiny", messages=[USER], response_format=City)


def _hints(url: str) -> None:
    _chat(
        url,
        [{"role": "developer", "content": "You help."}, {**USER, "name": "ann"}],
        max_completion_tokens=4,
        metadata={"session": "1"},
        store=True,
        prompt_cache_key="session-1",
        prompt_cache_retention="24h",
        safety_identifier="user-1",
        service_tier="flex",
        reasoning_effort="low",
        verbosity="low",
        prediction={"type": "content", "content": "It is sunny."},
        response_format={"type": "text"},
        modalities=["text"],
        user="ann",
    )


def _complete(url: str, **settings: Any) -> None:
    _client(url).completions.create(**{"model": "tiny", "prompt": "import os", "max_tokens": 4, **settings})


_PARTS = [
    {"type": "text", "text": "A long text. ", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "So?"},
]
_PREFILL = [USER, {"role": "assistant", "content": "It is"}]

_SENDERS: dict[str, Callable[[str], None]] = {
    "a completion": _complete,
    "a completion, streamed": lambda url: _complete(url, stream=True, stream_options={"include_usage": True}),
    "a completion with log-probabilities": lambda url: _complete(url, echo=True, logprobs=1, max_tokens=0),
    "a completion with every neutral setting": lambda url: _complete(
        url, best_of=1, suffix=None, logprobs=None, echo=False, stop=None, n=1, presence_penalty=0, user="ann"
    ),
    "a completion with a suffix": lambda url: _complete(url, suffix="end"),
    "a chat with hints": _hints,
    "a chat, streamed": _streamed,
    "an answer's message dumped": _dumped,
    "an agent with tools": lambda url: _agent(url, tools=[WEATHER]),
    "an agent's history without tools": lambda url: _agent(url, tool_choice="none", max_tokens=4),
    "an agent of old functions": _old_functions,
    "parts with cache marks": lambda url: _chat(url, [{"role": "user", "content": _PARTS}], max_tokens=4),
    "a picture": lambda url: _chat(url, [{"role": "user", "content": [*_PARTS, PICTURE]}], max_tokens=4),
    "a structured answer": _parsed,
    "a web search": lambda url: _chat(url, [USER], web_search_options={}),
    "thinking switched off": lambda url: _chat(
        url, [USER], max_tokens=4, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    ),
    "an answer begun": lambda url: _chat(
        url, _PREFILL, max_tokens=4, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    ),
    "settings of a table of floats": lambda url: _chat(url, [USER], max_tokens=4.0, n=1.0, seed=7.0),
    "no bound of tokens": lambda url: _chat(url, [USER], max_tokens=-1),
}
SENDERS = {f"openai: {name}": ("openai", send) for name, send in _SENDERS.items()}
