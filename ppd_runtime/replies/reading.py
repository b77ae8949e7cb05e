"""How the replies to one request are read: the reader with its settings, and what decoding has to do for it."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppd_runtime.replies.call_grammar import LATER_MISTRAL, call_grammar, thought_then
from ppd_runtime.replies.choice import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplyFormats, knows_tools
from ppd_runtime.replies.harmony import Harmony
from ppd_runtime.replies.message import AssistantMessage, message_of
from ppd_runtime.replies.qwen_xml import QwenXml
from ppd_runtime.replies.reader import Reader, Thinking
from ppd_runtime.replies.tools import ToolUse
from ppd_runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class ReplyReading:
    """How the replies to one request are read."""

    kind: type[Reader]
    thinking: Thinking | None = None
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of the arguments of the tools that may be called, by name."""
    parallel: bool = True
    """Whether a reply may have several calls."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the text has to have as they are written."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokenizer's special tokens."""
    form: str | None = None
    """The name of the form of calls in `call_grammar`; None if none may be made."""
    grammar: str | None = None
    """What the text has to look like, if it has to be a call."""

    def open(self) -> Reader:
        """A reader for one reply."""
        tools: Collection[str] = self.tools if self.kind is QwenXml else frozenset(self.tools)
        return self.kind(self.thinking, tools, self.parallel)

    def message_of(self, text: str) -> AssistantMessage:
        """The message that a whole reply is."""
        reader = self.open()
        return message_of([*reader.push(text), *reader.finish()])

    def params(self, params: SamplingParams) -> SamplingParams:
        """A request's settings: a text of one call at the most ends behind it, one that has to be a call is one.

        A form that is asked for besides is that of answers which are no calls.

        Raises:
            ValueError: if a schema of arguments cannot be kept to.
        """
        if self.grammar is None:
            params = self._with_calls(params) or self._behind_thinking(params)
            end = self.kind.end_of_call
            return params if self.parallel or end is None else replace(params, stop=(*params.stop, end))
        try:
            return replace(params.without_form(), grammar=self.grammar)
        except ValueError as error:
            what = str(error).removeprefix("grammar: ")
            raise ValueError(
                f"tools: a call cannot be required, the tools make a grammar that fails: {what}"
            ) from error

    def _with_calls(self, params: SamplingParams) -> SamplingParams | None:
        """Settings whose form is that of replies which are no calls; None if that cannot be."""
        if self.form in (None, "gpt_oss") or params.form is None or params.form.setting == "grammar":
            return None
        with contextlib.suppress(ValueError):  # schemas of arguments that cannot be kept to: the form alone holds
            grammar = call_grammar(
                str(self.form), self.tools, self.parallel, self.thinking, self.special, text=params.form
            )
            return replace(params.without_form(), grammar=grammar)
        return None

    def _behind_thinking(self, params: SamplingParams) -> SamplingParams:
        """Settings whose form leaves room for the thinking before it."""
        if params.form is None or self.thinking is None:
            return params
        if params.form.setting == "grammar" and not self.thinking.is_open:
            return params
        grammar = thought_then(params.form, self.thinking, self.special)
        return replace(params.without_form(), grammar=grammar)


def reading_of(
    template: str, prompt: str, tokenizer: PreTrainedTokenizerBase, use: ToolUse, formats: ReplyFormats
) -> ReplyReading | None:
    """How to read what follows a prompt; None: the text is the message.

    Args:
        template: the chat template's text.
        prompt: the text that it made.
        tokenizer: the model's.
        use: the request's tools.
        formats: how replies are read where that does not depend on the template.

    Raises:
        ValueError: if the model cannot be told of tools, its form of calls is unknown, or cannot be required.
    """
    form = _form(template, use, formats)
    kind = TOOL_CALL_PARSERS[form] if form else None
    thinking = _thinking(template, prompt, formats)
    if thinking is not None and thinking == REASONING_PARSERS["gpt_oss"]:
        kind = kind or Harmony
    if kind is None and thinking is None:
        return None
    marks = {*(kind.markers if kind else ()), *((thinking.opens, thinking.closes) if thinking else ())}
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    shown = frozenset(special[mark] for mark in marks if mark in special)
    written, grammar = None if form is None else _written(form, template), None
    if written is not None and use.is_forced:
        several = use.parallel and use.choice == "required"
        grammar = call_grammar(written, use.schemas, several, thinking, special)
    return ReplyReading(kind or Reader, thinking, use.schemas, use.parallel, shown, special, written, grammar)


def _written(form: str, template: str) -> str:
    """The form's name in `call_grammar`."""
    return LATER_MISTRAL if form == "mistral" and "[ARGS]" in template else form


def _form(template: str, use: ToolUse, formats: ReplyFormats) -> str | None:
    """The name of the form of calls; None if no tools are told."""
    if not use.told:
        return None
    if not knows_tools(template):
        raise ValueError(
            "tools: the model's chat template does not tell it of tools: give another chat template, or "
            "tool_choice='none'"
        )
    name = formats.calls_in(template)
    if name is None:
        known = ", ".join(TOOL_CALL_PARSERS)
        raise ValueError(f"tools: the chat template does not show how calls are written: set tool_call_parser: {known}")
    return name


def _thinking(template: str, prompt: str, formats: ReplyFormats) -> Thinking | None:
    name = formats.thinking_in(template)
    if name is None:
        return None
    marks = REASONING_PARSERS[name]
    return marks._replace(is_open=prompt.rstrip().endswith(marks.opens))
