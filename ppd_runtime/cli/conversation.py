"""What `ppd chat` does with what is typed: messages, commands, settings and the history; it knows no terminal."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppd_runtime.sampling.params import BY_CHANCE, SAMPLING_SETTINGS, SamplingParams, sampling_from
from ppd_runtime.settings.fields import check_known, summary

if TYPE_CHECKING:
    from ppd_runtime.methods.base import TextGenerator
    from ppd_runtime.methods.generation import Generation
    from ppd_runtime.results import GenerationResult

Message = Mapping[str, str]
SETTABLE = tuple(
    name
    for name in SAMPLING_SETTINGS
    if name not in ("logits_processors", "num_generated", "logprobs", "prompt_logprobs")  # of no use to a reader
)
"""Settings that /set knows."""
_MOST_NEW_TOKENS = 4096  # of an answer, where neither a setting nor the model has a bound
_MOST_BYTES = 2**26  # of a kept conversation
_ROLES = ("system", "user", "assistant")
_BLOCK = '"""'
_BEGINS_BLOCK = re.compile(rf"\s*(/\w+\s+)?{_BLOCK}")


def is_open(typed: str) -> bool:
    '''Whether more lines belong to it: behind a backslash at its end, and within a block of """.'''
    if begun := _BEGINS_BLOCK.match(typed):
        return not typed[begun.end() :].rstrip().endswith(_BLOCK)
    return typed.endswith("\\")


def message_of(typed: str) -> str:
    """What was meant by lines that are not open any more: without the backslashes or quotes that join them."""
    if begun := _BEGINS_BLOCK.match(typed):
        return (begun[1] or "") + typed[begun.end() :].rstrip().removesuffix(_BLOCK).strip("\n")
    return typed.replace("\\\n", "\n")


@dataclass(frozen=True)
class Turn:
    """A message whose answer is to be streamed."""

    messages: tuple[Message, ...]
    """The history, with the message."""
    generation: "Generation"
    note: str = ""
    """What there is to say behind the answer."""


class Conversation:
    """A conversation with a model: what is typed goes through `take`, and a streamed answer through `keep`.

    Args:
        generator: what answers.
        settings: of the sampling, by name, where they are not to be the model's own.
        template: a Jinja template or its file; None is the tokenizer's own.
        system: the system message.
    """

    def __init__(
        self,
        generator: "TextGenerator",
        settings: Mapping[str, Any] | None = None,
        template: str | Path | None = None,
        system: str | None = None,
    ) -> None:
        self._generator, self._template = generator, template
        self.settings: dict[str, Any] = {}
        for name, value in (settings or {}).items():
            self._set(name, value)
        self.system = system
        self.messages: tuple[Message, ...] = ()
        """Questions and answers, oldest first, without the system message."""

    @property
    def whole(self) -> list[Message]:
        """All that the model reads before the next message."""
        return with_system(self.messages, self.system)

    def take(self, typed: str) -> Turn | str | None:
        """What comes of a message or command: an answer to stream, a text to show, or None: it ends here.

        Raises:
            ValueError: for what cannot be done; nothing has changed then.
        """
        text = message_of(typed)
        if not text.strip():
            return ""
        if not text.startswith("/"):
            return self._asked(text)
        if text.startswith("//"):
            return self._asked(text[1:])
        name, rest = (*text[1:].split(None, 1), "", "")[:2]
        if name not in COMMANDS:
            raise ValueError(f"/{name}: no such command; /help lists them, and // begins a message with a slash")
        return COMMANDS[name].run(self, rest.strip())

    def keep(self, turn: Turn) -> str:
        """Take the finished answer into the history; what there is to say about its end."""
        result = turn.generation.result
        if not result.text and result.finish_reason in ("cancelled", "timeout"):
            return "ended before its first word: the message is not kept"
        self.messages = (*turn.messages, _message("assistant", result.text))
        return self._about_end(result) or turn.note

    def _about_end(self, result: "GenerationResult") -> str:
        if result.finish_reason != "length":
            return ""
        if result.stats.new_tokens == self.settings.get("max_new_tokens"):
            return f"ended at max_new_tokens={result.stats.new_tokens}; /set max_new_tokens none ends it with the text"
        if result.stats.new_tokens == _MOST_NEW_TOKENS and self._generator.info.max_positions is None:
            return f"ended after {_MOST_NEW_TOKENS} tokens; /set max_new_tokens NUMBER allows more"
        return f"ended, for the context is full; {_WAYS_OUT}"

    def _asked(self, text: str) -> Turn:
        return self._turn((*self.messages, _message("user", text)))

    def _turn(self, messages: tuple[Message, ...]) -> Turn:
        from ppd_runtime.results import Live

        prompt = self._generator.chat_prompt(with_system(messages, self.system), self._template)
        prompt_ids = self._generator.prompt_ids(prompt, add_special_tokens=False)
        params = self._generator.chat_params(self._params(self.settings, self._left(len(prompt_ids))))
        return Turn(messages, self._generator.request(prompt_ids, params, Live.BOUNDARIES))

    def _params(self, settings: Mapping[str, Any], left: int = _MOST_NEW_TOKENS) -> SamplingParams:
        usual = {"temperature": self._generator.defaults.temperature or 0.0, "seed": BY_CHANCE, "max_new_tokens": left}
        params = sampling_from(None, {**usual, **settings})
        return replace(params, max_new_tokens=min(params.max_new_tokens, left))

    def _left(self, prompt_size: int) -> int:
        """New tokens for which there is room behind a prompt; a model without an end gets one."""
        room, positions = self._generator.room, self._generator.info.max_positions
        bounds = [bound for bound in (positions, room and room.most) if bound is not None]
        most: int = self.settings.get("max_new_tokens", _MOST_NEW_TOKENS)
        if not bounds:
            return most
        if prompt_size >= min(bounds):
            full = f"the conversation has {prompt_size} tokens with this message, and {min(bounds)} fit"
            raise ValueError(f"{full}: it is not sent; {_WAYS_OUT if self.messages else 'give a shorter one'}")
        left = min(bounds) - prompt_size
        return min(left, most) if positions is None else left

    def _set(self, name: str, value: Any) -> None:
        check_known("/set", [name], SETTABLE)
        if name == "max_new_tokens" and value is None:
            self.settings.pop(name, None)
            return
        others = {other: given for other, given in self.settings.items() if other != name}
        self._params({**others, name: value})
        self.settings = {**others, name: value}

    def _help(self, rest: str) -> str:
        width = max(len(command.usage) for command in COMMANDS.values())
        lines = [f"{command.usage:{width}}  {command.about}" for command in COMMANDS.values()]
        return "\n".join([*lines, *_ABOUT_TYPING])

    def _change_system(self, rest: str) -> str:
        before, self.system = self.system, rest or None
        if rest:
            return "the system message is set; it counts from the next answer on"
        return f"no system message any more, it was: {before}" if before else "there is no system message"

    def _retry(self, rest: str) -> Turn:
        if not self.messages:
            raise ValueError("/retry: there is no message yet")
        *before, last = self.messages
        turn = self._turn(tuple(before) if last["role"] == "assistant" else self.messages)
        chosen = self._generator.settled(self._params(self.settings))
        return replace(turn, note=_SAME if chosen.greedy and last["role"] == "assistant" else "")

    def _show_or_set(self, rest: str) -> str:
        name, text = (*rest.split(None, 1), "", "")[:2]
        if not name:
            return "\n".join(self._told())
        check_known("/set", [name], SETTABLE)
        if not text:
            return self._told_of(name)
        if text.lower() in ("none", "default"):
            self.settings.pop(name, None)
        else:
            self._set(name, value_of(text))
        return self._told_of(name)

    def _told(self) -> Iterator[str]:
        yield from map(self._told_of, SETTABLE)

    def _told_of(self, name: str) -> str:
        return f"{name}={self._value_in_force(name)}: {summary(SamplingParams, name)}"

    def _value_in_force(self, name: str) -> str:
        if name == "max_new_tokens" and name not in self.settings:
            return "as many as fit"
        value = getattr(self._generator.settled(self._params(self.settings)), name)
        if name == "seed" and self.settings.get(name, BY_CHANCE) == BY_CHANCE:
            return "by chance"
        return "none" if value is None or value == () else str(value)

    def _save(self, rest: str) -> str:
        from ppd_runtime.files.atomic import atomic_file

        path = _path("/save", rest)
        if path.exists() and not path.is_file():
            raise ValueError(f"/save {path}: is no file; give another name")
        text = json.dumps({"model": self._generator.info.name, "messages": self.whole}, indent=2, ensure_ascii=False)
        with atomic_file(path) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")
        return f"{_count(self.whole)} written to {path}"

    def _load(self, rest: str) -> str:
        messages, replaced = read_messages(_path("/load", rest)), len(self.messages)
        first = messages[:1] if messages[:1] and messages[0]["role"] == "system" else ()
        self.system = first[0]["content"] if first else None
        self.messages = messages[len(first) :]
        return f"{_count(messages)} read" + (f" in the place of {replaced}" if replaced else "")

    def _clear(self, rest: str) -> str:
        gone, self.messages = _count(self.messages), ()
        return f"{gone} forgotten; the system message and the settings stay"

    def _exit(self, rest: str) -> None:
        """It ends here."""


@dataclass(frozen=True)
class Command:
    """What a word behind a slash does."""

    usage: str
    about: str
    run: Callable[[Conversation, str], Turn | str | None]


COMMANDS: Mapping[str, Command] = {
    command.usage.split()[0][1:]: command
    for command in (
        Command("/help", "show this", Conversation._help),
        Command("/system TEXT", "set the system message; without a text: remove it", Conversation._change_system),
        Command("/retry", "answer the last message again", Conversation._retry),
        Command("/set NAME VALUE", "set how tokens are chosen; none is the default", Conversation._show_or_set),
        Command("/save FILE", "write the conversation as JSON", Conversation._save),
        Command("/load FILE", "go on with a written conversation", Conversation._load),
        Command("/clear", "begin a new conversation", Conversation._clear),
        Command("/exit", "leave, as Ctrl-D does", Conversation._exit),
    )
}
_ABOUT_TYPING = (
    "/set alone shows every setting, /set NAME one of them.",
    'A message may have several lines: Alt-Enter, a backslash at the line\'s end, or """ around them.',
    "Ctrl-C ends an answer; what there is of it stays.",
)
_SAME = "the likeliest tokens are the same each time; /set temperature 0.8 gives other answers"
_WAYS_OUT = "/clear begins a new conversation, /save FILE keeps this one"


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """A conversation with its system message."""
    return [*([_message("system", system)] if system else []), *messages]


def value_of(text: str) -> Any:
    """A setting's value as it is typed: a number, true, a list or a dictionary as Python has them, or else a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def read_messages(path: Path) -> tuple[Message, ...]:
    """The messages of a file that /save has written, or of a list of messages.

    Raises:
        ValueError: for a file that holds no such thing.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        held = json.loads(content)
    except OSError as error:
        raise ValueError(f"/load {path}: {error.strerror}; give a file that /save has written") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"/load {path}: no conversation ({error}); give a file that /save has written") from error
    listed = held.get("messages") if isinstance(held, dict) else held
    if not isinstance(listed, list):
        raise ValueError(f"/load {path}: has no list of messages; give a file that /save has written")
    for place, one in enumerate(listed):
        if not isinstance(one, dict) or not isinstance(one.get("content"), str) or one.get("role") not in _ROLES:
            raise ValueError(f"/load {path}: message {place + 1} has no content, or no role of {', '.join(_ROLES)}")
        if place and one["role"] == "system":
            raise ValueError(f"/load {path}: message {place + 1} is a system message, which stands first")
    return tuple(_message(one["role"], one["content"]) for one in listed)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _count(messages: Sequence[Message]) -> str:
    return f"{len(messages)} message{'' if len(messages) == 1 else 's'}"


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise ValueError(f"{command}: give a file")
    return Path(rest).expanduser()
