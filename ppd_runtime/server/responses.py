"""`/v1/responses`: what clients may ask for, and the chat that it comes to. Nothing is stored."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import Field

from ppd_runtime.replies.tools import MOST_TOOLS
from ppd_runtime.server.body import can_be_repeated
from ppd_runtime.server.conversations import MOST_MESSAGES
from ppd_runtime.server.errors import ApiError, shown
from ppd_runtime.server.left_aside import Hints
from ppd_runtime.server.requests import ChatRequest

_NOT_STORED = "this server stores no responses, send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "prompt": "this server has no prompts of its own, send instructions and input",
}
RESPONSES_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""This path's names of the fields of chats."""
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "safety_identifier")
"""Fields that the answer repeats as they came."""
_REPEATED = (*ECHOED, "tools", "tool_choice", "text")
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_WITHOUT_EFFECT = ("reasoning.encrypted_content",)
"""What may be in `include`: nothing is encrypted, the reasoning is in the items."""
Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ResponsesRequest(Hints):
    """`POST /v1/responses`."""

    asks_for_nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "text": ({}, {"format": {"type": "text"}}),
    }

    model: str | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = Field(None, max_length=100)
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool = False
    reasoning: Any = None
    """A hint; so are those below."""
    max_tool_calls: Any = None

    def as_chat(self) -> ChatRequest:
        """The chat that this request comes to.

        Raises:
            ApiError: for what is stored elsewhere, and items and values that are not known.
        """
        self._check()
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else messages_of(self.input)
        same = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls")
        asked = {
            "messages": [*instructions, *given],
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": _tool_choice(self.tool_choice),
            "max_completion_tokens": self.max_output_tokens,
            "chat_template_kwargs": self.chat_template_kwargs,
            "stream": self.stream,
            "response_format": self._response_format(),
        }
        return ChatRequest.model_validate({**asked, **{name: getattr(self, name) for name in same}})

    def _check(self) -> None:
        for name, way_out in _REFUSED.items():
            if (value := getattr(self, name)) is not None:
                _refuse(name, f"{name}={shown(value)}: {way_out}")
        for name in _REPEATED:
            if not can_be_repeated(value := getattr(self, name)):
                _refuse(name, f"{name}={shown(value)}: has a number that is not finite, or too many levels: mend it")
        for name in self.include or ():
            if name not in _WITHOUT_EFFECT:
                _refuse("include", f"include: {shown(name)} is not there to be included, leave it out")

    @property
    def format(self) -> dict[str, Any]:
        """What the text looks like, as the answer repeats it."""
        found = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(found, dict):
            _refuse("text", f"text.format={shown(found)}: give an object with a type, or leave it out")
        return found

    def _response_format(self) -> dict[str, Any]:
        """The form of the text in the field of chats."""
        kind = self.format.get("type")
        if kind != "json_schema":
            return self.format
        return {"type": kind, kind: {name: value for name, value in self.format.items() if name != "type"}}


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation that comes as items: what follows each other of one answer is one message.

    Raises:
        ApiError: for items that are stored elsewhere, or not known.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for number, item in enumerate(items):
        place, kind = f"input: number {number}", item.get("type", "message")
        if kind == "function_call_output":
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(place, item.get("output"))})
            answer = None
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": _role(place, item), "content": _text(place, item.get("content"))})
            answer = None
        else:
            if answer is None or (kind == "message" and answer["content"] is not None):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            _add_to_answer(place, kind, item, answer)
    return messages


def _add_to_answer(place: str, kind: Any, item: Mapping[str, Any], answer: dict[str, Any]) -> None:
    if kind == "message":
        answer["content"] = _text(place, item.get("content"))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    elif kind == "reasoning":
        thought = _text(place, item.get("content") or item.get("summary") or "", ("reasoning_text", "summary_text"))
        if thought:
            answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
    elif kind == "item_reference":
        _refuse("input", f"{place} is stored elsewhere ({shown(item.get('id'))}): {_NOT_STORED}")
    else:
        known = "message, function_call, function_call_output and reasoning"
        _refuse("input", f"{place} is of type {shown(kind)}, known are {known}: leave it out")


def _role(place: str, item: Mapping[str, Any]) -> str:
    role = item.get("role")
    if role not in _ROLES:
        _refuse("input", f"{place} has role={shown(role)}: give one of {', '.join(_ROLES)}")
    return str(role)


def _text(place: str, content: Any, kinds: Sequence[str] = _TEXTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse("input", f"{place} has the content {shown(content)}: give a text, or a list of parts that are texts")
    return "".join(_text_of_part(place, part, kinds) for part in content)


def _text_of_part(place: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*kinds, "refusal") or not isinstance(text, str):
        _refuse("input", f"{place} has a part {shown(part)}, which is no text: leave it out")
    return str(text)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the form of chats; others as they are, for the check to name."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    return given


def _refuse(param: str, message: str) -> NoReturn:
    raise ApiError(400, message, param)
