"""A conversation's next message: the prompt, and how the reply to it is read."""

from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

from transformers import PreTrainedTokenizerBase

from ppd_runtime.methods.chat import Messages, TemplateOptions, chat_text
from ppd_runtime.replies.choice import AUTO, ReplyFormats
from ppd_runtime.replies.message import AssistantMessage
from ppd_runtime.replies.reading import ReplyReading, reading_of
from ppd_runtime.replies.tools import Tools, ToolUse, tool_use
from ppd_runtime.results import GenerationResult


class ReplyOptions(TypedDict, total=False):
    """Which tools the model may call, and how its reply is read."""

    tools: Tools | None
    """Functions in OpenAI's form, or Python functions whose docstrings describe their arguments in Google's style. The
    template tells the model of them."""
    tool_choice: Any
    """auto: the model decides; none: it is not told of the tools; required, or a tool's name: the reply is a call whose
    arguments obey the tool's schema."""
    parallel_tool_calls: bool | None
    """False: one call at the most; the text ends behind it where the form of calls has an end."""
    tool_call_parser: str
    """The form of calls: auto for the chat template's, hermes, qwen3_coder, llama3_json, mistral, gemma or gpt_oss."""
    reasoning_parser: str
    """The form of thinking: auto for the chat template's, none to leave it in the text, think, mistral or gpt_oss."""


class ChatTurn(NamedTuple):
    """A conversation's next message, before it is decoded."""

    prompt: str
    """What the model reads, with special tokens as they are written."""
    reading: ReplyReading | None
    """None: the text is the message."""

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that the text has to have as they are written."""
        return self.reading.shown if self.reading else frozenset()

    def answered(self, result: GenerationResult) -> GenerationResult:
        """A result with its message."""
        reading = self.reading
        return replace(result, message=reading.message_of(result.text) if reading else AssistantMessage(result.text))


def reply_options(settings: dict[str, Any]) -> tuple[ToolUse, ReplyFormats]:
    """Take `ReplyOptions` out of the settings of a call; raises ValueError for those that cannot work."""
    names = ("tools", "tool_choice", "parallel_tool_calls")
    use = tool_use(*(settings.pop(name, None) for name in names))
    return use, ReplyFormats(*(settings.pop(name, AUTO) for name in ("tool_call_parser", "reasoning_parser")))


def chat_turn(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    options: TemplateOptions,
    use: ToolUse,
    formats: ReplyFormats,
) -> ChatTurn:
    """The prompt of a conversation's next message, and how the reply is read.

    Raises:
        ValueError: see `chat_text` and `reading_of`.
    """
    told = [dict(tool.told) for tool in use.told]
    prompt = chat_text(messages, tokenizer, template, options, told)
    text = tokenizer.get_chat_template(template, told or None)
    return ChatTurn(prompt, reading_of(text, prompt, tokenizer, use, formats))
