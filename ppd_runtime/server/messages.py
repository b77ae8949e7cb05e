"""Anthropic's `/v1/messages`: what clients may ask for, and the chat that it comes to."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Field

from ppd_runtime.replies.tools import MOST_TOOLS
from ppd_runtime.sampling.params import MOST_STOPS
from ppd_runtime.server.body import Body
from ppd_runtime.server.conversations import MOST_MESSAGES, Parts
from ppd_runtime.server.errors import ApiError, shown
from ppd_runtime.server.requests import ChatRequest

MESSAGES_FIELDS = {"response_format": "output_config", "stop": "stop_sequences"}
"""This path's names of the fields of chats."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class Turn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Parts


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`: what the model reads."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mcp_servers": ([],)}

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: str | Parts | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """The text's form; its other parts are hints."""
    cache_control: Any = None
    """A hint."""

    def as_chat(self) -> ChatRequest:
        """The chat that this request comes to.

        Raises:
            ApiError: for blocks, tools and values that are not known.
        """
        kind = (self.thinking or {}).get("type")
        if self.thinking is not None and not (isinstance(kind, str) and kind in _THINKING):
            _refuse("thinking", f"thinking.type={shown(kind)}: give one of {', '.join(_THINKING)}")
        variables = {} if self.thinking is None else {"enable_thinking": _THINKING[str(kind)]}
        choice, one_call = _tool_choice(self.tool_choice)
        asked = {
            "model": self.model,
            "messages": self._as_messages(),
            "tools": None if self.tools is None else [_tool(number, tool) for number, tool in enumerate(self.tools)],
            "tool_choice": choice,
            "parallel_tool_calls": False if one_call else None,
            "response_format": self._response_format(),
            "chat_template_kwargs": {**variables, **(self.chat_template_kwargs or {})},
        }
        return ChatRequest.model_validate({**asked, **self._settings})

    def _response_format(self) -> dict[str, Any] | None:
        """The form of the text in the field of chats."""
        given = (self.output_config or {}).get("format")
        if given is None:
            return None
        if not isinstance(given, dict) or given.get("type") != "json_schema" or set(given) - {"type", "schema"}:
            _refuse("output_config", f"output_config.format={shown(given)}: give the type json_schema and a schema")
        return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}

    @property
    def _settings(self) -> dict[str, Any]:
        """How tokens are chosen, in the fields of chats."""
        return {}

    def _as_messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": _text("system", self.system)}] if self.system else []
        turns = [one for number, turn in enumerate(self.messages) for one in _messages_of(number, turn)]
        return [*system, *turns]


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    metadata: Any = None
    """A hint; so is the one below."""
    service_tier: Any = None

    @property
    def _settings(self) -> dict[str, Any]:
        same = ("temperature", "top_p", "top_k", "max_tokens", "stream")
        return {"stop": self.stop_sequences, **{name: getattr(self, name) for name in same}}


def _messages_of(number: int, turn: Turn) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own, before what the user says."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    place = f"messages: number {number}"
    if turn.role == "assistant":
        return [_answer(place, turn.content)]
    results = [part for part in turn.content if part.get("type") == "tool_result"]
    others = [part for part in turn.content if part.get("type") != "tool_result"]
    told = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _text(place, part.get("content") or "")}
        for part in results
    ]
    return [*told, {"role": turn.role, "content": _text(place, others)}] if others or not told else told


def _answer(place: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], "", []
    for part in parts:
        kind = part.get("type")
        if kind == "tool_use":
            if not isinstance(given := part.get("input"), dict):
                _refuse("messages", f"{place} has a tool_use with input={shown(given)}: give an object")
            function = {"name": part.get("name"), "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += str(part.get("thinking") or "")
        elif kind != "redacted_thinking":
            texts.append(part)
    message: dict[str, Any] = {"role": "assistant", "content": _text(place, texts) if texts else None}
    return {
        **message,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def _text(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(place.partition(":")[0], f"{place} has the content {shown(content)}: give a text, or a list of blocks")
    return "".join(_text_of_block(place, part) for part in content)


def _text_of_block(place: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        _refuse(place.partition(":")[0], f"{place} has a block {shown(part)}, which is no text: leave it out")
    return text


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        _refuse("tools", f"tools: number {number} is {shown(dict(tool))}: the server has no such tool, leave it out")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(given: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """The choice as chats have it, and whether one call is the most."""
    if given is None:
        return None, False
    one_call, kind = given.get("disable_parallel_tool_use") is True, given.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, one_call
    if not isinstance(kind, str) or kind not in _CHOICES:
        _refuse("tool_choice", f"tool_choice.type={shown(kind)}: give one of tool, {', '.join(_CHOICES)}")
    return _CHOICES[kind], one_call


def _refuse(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param)
