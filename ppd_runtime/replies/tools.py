"""The tools of a request, and which of them the model may or has to call."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers.utils import get_json_schema

Tools: TypeAlias = Sequence[Mapping[str, Any] | Callable[..., Any]]
"""Functions in OpenAI's form, or Python functions whose docstrings describe their arguments."""
MOST_TOOLS = 512
CHOICES = ("auto", "none", "required")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    told: Mapping[str, Any]
    """What the template tells the model."""


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools.

    Raises:
        ValueError: naming the field, the value and the way out.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    """auto, none, required, or `named` if one tool has to be called."""
    named: str | None = None
    parallel: bool = True
    """Whether a reply may have several calls."""

    @property
    def told(self) -> tuple[Tool, ...]:
        """The tools that the model is told of: none if it may call none."""
        return () if self.choice == "none" else self.tools

    @property
    def is_forced(self) -> bool:
        """Whether the reply has to be a call."""
        return self.choice in ("required", "named")

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the arguments of the tools that may be called, by name."""
        return {tool.name: tool.parameters for tool in self.told if self.named in (None, tool.name)}


def tool_use(tools: Tools | None = None, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolUse:
    """A request's tools, checked.

    Args:
        tools: see `Tools`; None or an empty list is none.
        tool_choice: auto (also None), none, required, a tool's name, or OpenAI's object that names one.
        parallel_tool_calls: see `ToolUse.parallel`; None is true.

    Raises:
        ValueError: for tools that are none, equal names, and a choice that names none of them.
    """
    found = _tools(tools)
    choice, named = _choice(tool_choice, {tool.name for tool in found})
    if not isinstance(parallel_tool_calls, bool | None):
        raise ValueError(f"parallel_tool_calls={parallel_tool_calls!r:.100}: give true or false")
    return ToolUse(found, choice, named, parallel_tool_calls is not False)


def _tools(given: Tools | None) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ValueError(f"tools={given!r:.200}: give a list of functions")
    if len(given) > MOST_TOOLS:
        raise ValueError(f"tools: {len(given)} of them, give at most {MOST_TOOLS}")
    found = [_tool(number, one) for number, one in enumerate(given)]
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"tools: {name!r} is the name of several, give each its own")
    return tuple(found)


def _tool(number: int, given: Any) -> Tool:
    place = f"tools: number {number}"
    if not isinstance(given, Mapping) and callable(given):
        given = _described(place, given)
    if not isinstance(given, Mapping) or given.get("type") != "function":
        raise ValueError(f"{place} is {given!r:.200}: only functions are known, give its type function and a function")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise ValueError(f"{place} has no function: give an object with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "has no name" if name is None else f"has the name {name!r:.150}"
        raise ValueError(f"{place} {what}: give function.name, 1 to 128 letters, digits, '_', '-' and '.'")
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{place} ({name}) has a description that is no text: give a text, or leave it out")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise ValueError(f"{place} ({name}) has parameters={parameters!r:.100}: give a JSON schema, or leave it out")
    told = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return Tool(name, parameters or {"type": "object", "properties": {}}, {"type": "function", "function": told})


def _described(place: str, function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return dict(get_json_schema(function))
    except Exception as error:  # transformers' own errors, and those of hints
        raise ValueError(f"{place}: {' '.join(str(error).split()):.300}; or give it in OpenAI's form") from error


def _choice(given: Any, names: set[str]) -> tuple[str, str | None]:
    if given is None or (given == "auto" and isinstance(given, str)):
        return "auto", None
    if isinstance(given, str) and given in CHOICES:
        if given == "required" and not names:
            raise ValueError("tool_choice='required': there are no tools, give tools or leave it out")
        return given, None
    name: Any = given
    if isinstance(given, Mapping):
        function = given.get("function")
        name = function.get("name") if given.get("type") == "function" and isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice={given!r:.200}: give auto, none, required, or the name of one of the tools")
    if name not in names:
        known = f"give one of {', '.join(sorted(names))[:200]}" if names else "there are no tools, give some"
        raise ValueError(f"tool_choice={name!r:.150}: is no tool of the request, {known}")
    return "named", name


def check_history(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check the calls and results of a conversation.

    Raises:
        ValueError: for a call without a name, and a result for a call that nobody made.
    """
    made: set[str | None] = set()
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            made |= _calls_made(number, message.get("tool_calls"))
        elif message.get("role") == "tool":
            _check_result(number, message.get("tool_call_id"), made)


def _calls_made(number: int, calls: Any) -> set[str | None]:
    if calls is None:
        return set()
    place = f"messages: number {number}"
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ValueError(f"{place} has tool_calls={calls!r:.100}: give a list")
    return {_call_made(place, call) for call in calls}


def _call_made(place: str, call: Any) -> str | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{place} has the call {call!r:.150}, which names no function: give function.name")
    if not isinstance(function.get("arguments"), str | Mapping | None):
        raise ValueError(f"{place} calls {function['name']!r:.100} with no object: give arguments as JSON text")
    call_id = call.get("id")
    if not isinstance(call_id, str | None):
        raise ValueError(f"{place} calls {function['name']!r:.100} with id={call_id!r:.100}: give a text")
    return call_id


def _check_result(number: int, given: Any, made: set[str | None]) -> None:
    place = f"messages: number {number} is the result of"
    if given is None:
        if made <= {None} and made:
            return
        what = "no call: give tool_call_id" if made else "a call, and there is none before it"
        raise ValueError(f"{place} {what}, or leave it out")
    if given not in made if isinstance(given, str) else True:
        raise ValueError(
            f"{place} the call {given!r:.100}, which no message before it made: give the id of one, or leave it out"
        )
