"""Conversations as clients send them, and the prompt that the chat template makes of one."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ppd_runtime.methods.base import TextGenerator
from ppd_runtime.methods.chat import TemplateOptions, has_template
from ppd_runtime.methods.chat_turn import ChatTurn
from ppd_runtime.replies.choice import ReplyFormats
from ppd_runtime.replies.tools import MOST_TOOLS, tool_use
from ppd_runtime.server.body import Body
from ppd_runtime.server.errors import ApiError

MOST_MESSAGES = 10_000
"""Lists are checked up to their first fault: one of each part takes half a minute."""

Parts = Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES, fail_fast=True)]


class ChatMessage(Body):
    """One of a conversation; what it has besides, as calls of tools, goes to the template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as it came, without nulls."""
        return {"role": self.role, "content": self.content, **(self.model_extra or {})}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Templated(Body):
    """How the template reads a conversation; vLLM's names."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_options(self) -> TemplateOptions:
        """The library's form of the template's options."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class WithTools(Templated):
    """The tools that a conversation's model may call."""

    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def turn_of(
    messages: list[ChatMessage],
    asked: WithTools,
    generator: TextGenerator,
    chat_template: str | None,
    formats: ReplyFormats,
) -> ChatTurn:
    """A conversation's next message: the text in which the model reads it, and how its reply is read.

    Raises:
        ApiError: if there is no template.
        ValueError: if it does not take the conversation or the tools.
    """
    if not has_template(generator.tokenizer, chat_template):
        way_out = "start the server with --chat-template FILE, or ask /v1/completions"
        raise ApiError(400, f"messages: the model has no chat template: {way_out}", "messages")
    given = [message.as_dict() for message in messages]
    use = tool_use(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    return generator.chat_turn(given, chat_template, asked.template_options, use, formats)
