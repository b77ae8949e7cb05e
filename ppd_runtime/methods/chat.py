"""Conversations as prompts, by the tokenizer's template or one of the user's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""Each with a "role" and a "content", oldest first."""

_MOST_CHARACTERS = 2**20


def template_of(given: str | Path | None) -> str | None:
    """A template that is given as text, which holds a brace, or as a file's path.

    Raises:
        ValueError: for a file that cannot be read, and a template that is none.
    """
    if given is None:
        return None
    text = str(given)
    if isinstance(given, Path) or "{" not in text:
        text = _read(Path(given))
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateError as error:
        raise ValueError(f"chat_template={str(given)!r:.200}: no Jinja template: {error}; give another") from error
    return text


def chat_text(messages: Messages, tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """The text in which a model reads `messages` and begins its answer, special tokens among it.

    Raises:
        ValueError: without a template, for messages of another form, and for those that the template refuses.
    """
    if template is None and tokenizer.chat_template is None:
        raise ValueError("messages: the model's tokenizer has no chat template, give one as chat_template")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r:.200}: give a list of messages with a role and a content")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages: {message!r:.200} is none, give a role and a content")
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
            )
        )
    except Exception as error:
        raise ValueError(f"messages: the chat template does not take them: {error}") from error


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
