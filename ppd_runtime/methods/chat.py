"""Conversations as prompts, by the tokenizer's template or one of the user's."""

import contextlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ppd_runtime.replies.tools import check_history
from ppd_runtime.settings.checks import check_bool

Messages: TypeAlias = Sequence[Any]
"""Messages, oldest first: mappings, or objects with `model_dump()`, with a "role" and a "content"."""

_MOST_CHARACTERS = 2**20
_MOST_LEVELS, _MOST_VARIABLES = 64, 200
_MOST_TOLD = 300
_MAY_SAY_NOTHING = ("assistant", "tool", "function")
_FOR_TEMPLATES = {"documents"}
"""What transformers names as an argument, though only templates read it."""
_ARGUMENTS = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *inspect.signature(render_jinja_template).parameters,
    "messages",
} - _FOR_TEMPLATES


class TemplateOptions(TypedDict, total=False):
    """How a template reads a conversation; transformers' names and meanings."""

    add_generation_prompt: bool | None
    """Begin the assistant's next message; None: unless the last one is continued."""
    continue_final_message: bool
    """Leave the last message open, so that the text goes on with it."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables for the template, such as `enable_thinking`."""


def options_of(settings: dict[str, Any]) -> TemplateOptions:
    """Take a template's options out of the settings of a call."""
    found = {name: settings.pop(name) for name in TemplateOptions.__annotations__ if name in settings}
    return TemplateOptions(**found)  # type: ignore[typeddict-item]


def template_of(given: str | Path | None) -> str | None:
    """A template that is given as text, which holds a brace, or as a file's path.

    Raises:
        ValueError: for an unreadable file, and for a text that is no template.
    """
    if given is None:
        return None
    text = str(given)
    if isinstance(given, Path) or "{" not in text:
        text = _read(Path(given))
    try:
        render_jinja_template([], chat_template=text)  # without messages: transformers compiles and caches it
    except Exception as error:
        what = f"no Jinja template{_told(error)}"
        raise ValueError(f"chat_template={str(given)!r:.200}: {what}; give another") from error
    return text


def has_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> bool:
    """Whether there is any."""
    return template is not None or tokenizer.chat_template is not None


def chat_text(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    options: TemplateOptions,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text in which a model reads `messages` and begins or continues its answer, special tokens among it.

    `tools` are those that the template tells the model of, in OpenAI's form.

    Raises:
        ValueError: without a template, for messages of another form, for variables that are not the template's, for
            results of calls that nobody made, and for what the template refuses.
    """
    if not has_template(tokenizer, template):
        raise ValueError("messages: the model's tokenizer has no chat template, give one: chat_template=…")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r:.200}: give a list of messages with a role and a content")
    _check_levels(messages, "messages")
    _check_levels(tools, "tools")
    given, settings = [_message(message) for message in messages], _settings(options, tokenizer)
    check_history(given)
    if tools:
        settings["tools"] = [dict(tool) for tool in tools]
    try:
        return _rendered(given, tokenizer, template, settings)
    except Exception as error:
        raise ValueError(f"messages: the chat template does not take them{_told(error)}") from error


def _rendered(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, template: str | None, settings: dict[str, Any]
) -> str:
    def render(given: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(given, chat_template=template, tokenize=False, **settings))

    with_objects = [_with_object_arguments(message) for message in messages]
    try:
        text = render(messages)
    except Exception:
        if (others := [{"content": "", **message} for message in with_objects]) == messages:
            raise
        return render(others)
    if with_objects != messages and _quotes_arguments(messages, text):
        with contextlib.suppress(Exception):
            return render(with_objects)
    return text


def _quotes_arguments(messages: list[dict[str, Any]], text: str) -> bool:
    """Whether a template wrote arguments, which are JSON text already, as a JSON string: it asks for objects."""
    calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict))
    functions = (call.get("function") for call in calls)
    arguments = (function.get("arguments") for function in functions if isinstance(function, dict))
    return any(isinstance(one, str) and json.dumps(one, ensure_ascii=False) in text for one in arguments)


def _with_object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have objects as arguments instead of JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_objects(call) for call in calls]}


def _with_objects(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _message(given: Any) -> dict[str, Any]:
    """A message for templates: its text in one piece, its other fields unchanged."""
    dumped = given.model_dump() if hasattr(given, "model_dump") else given
    if not isinstance(dumped, Mapping) or not isinstance(dumped.get("role"), str):
        raise ValueError(f"messages: {given!r:.200} is none, give a role and a content")
    message = {name: value for name, value in dumped.items() if value is not None}
    if "content" in message:
        message["content"] = _text_of(message["content"])
    elif message["role"] not in _MAY_SAY_NOTHING:
        raise ValueError(f"messages: {given!r:.200} has no content, give one")
    if "audio" in message:
        raise ValueError(f"messages: {given!r:.200} has audio, and only text is read: leave it out")
    if message["role"] == "developer":  # the newer name of it, which templates do not have
        message["role"] = "system"
    return message


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"messages: content={content!r:.200}: give a text, or a list of parts that are texts")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: Any) -> str:
    """A part's text, or a refusal's; hints such as `cache_control` are ignored."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal"):
        named = f"of type {kind!r:.50}" if isinstance(kind, str) else f"{part!r:.100}"
        raise ValueError(f"messages: a part {named} is no text, and only text is read: leave it out")
    if not isinstance(part.get(kind), str):
        raise ValueError(f"messages: a part {part!r:.200} has no {kind}, give it")
    return str(part[kind])


def _settings(options: TemplateOptions, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Arguments of `apply_chat_template`."""
    begins, continues = options.get("add_generation_prompt"), options.get("continue_final_message", False)
    check_bool("continue_final_message", continues)
    if begins is not None:
        check_bool("add_generation_prompt", begins)
    if begins and continues:
        raise ValueError(
            "continue_final_message=True: add_generation_prompt=True begins another message, leave one of them out"
        )
    variables = options.get("chat_template_kwargs") or {}
    _check_variables(variables, {*_ARGUMENTS, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map})
    begins = not continues if begins is None else begins
    return {**variables, "add_generation_prompt": begins, "continue_final_message": continues}


def _check_variables(variables: Any, taken: set[str]) -> None:
    name = "chat_template_kwargs"
    if not isinstance(variables, Mapping) or not all(isinstance(one, str) for one in variables):
        raise ValueError(f"{name}={variables!r:.200}: give the template's variables by name")
    if len(variables) > _MOST_VARIABLES:
        raise ValueError(f"{name}: {len(variables)} of them, give at most {_MOST_VARIABLES}")
    for one in variables:
        if one in taken:
            raise ValueError(f"{name}: {one!r} is not given in this way, leave it out")
    _check_levels([variables], name)


def _check_levels(values: Sequence[Any], name: str) -> None:
    """Raise ValueError for values nested too deep for Python."""
    for _ in range(_MOST_LEVELS):
        values = [part for value in values for part in _parts(value)]
        if not values:
            return
    raise ValueError(f"{name}: more than {_MOST_LEVELS} levels of lists and objects, give fewer")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _told(error: Exception) -> str:
    """A template's error in one line, with the template's own line number if it is known."""
    line, place = getattr(error, "lineno", None), error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == "<template>":  # Jinja's name for one that is no file
            line = place.tb_lineno
        place = place.tb_next
    named = "" if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: "
    what = " ".join(f"{named}{error}".split())
    return f"{'' if line is None else f', line {line}'}: {what:.{_MOST_TOLD}}"


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except OSError as error:
        raise ValueError(f"chat_template={str(path)!r}: {error.strerror}; give a Jinja template's file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template={str(path)!r}: no UTF-8 text; give a Jinja template's file") from error
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"chat_template={str(path)!r}: longer than {_MOST_CHARACTERS} characters; give a template")
    return text
