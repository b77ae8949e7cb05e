"""Which reader a model's replies need: by name, or by the text of its chat template."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ppd_runtime.replies.gemma import Gemma
from ppd_runtime.replies.harmony import Harmony
from ppd_runtime.replies.json_formats import Hermes, Llama3, Mistral
from ppd_runtime.replies.qwen_xml import QwenXml
from ppd_runtime.replies.reader import Reader, Thinking
from ppd_runtime.settings.checks import check_choice

AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS: Mapping[str, type[Reader]] = MappingProxyType(
    {
        "gpt_oss": Harmony,
        "qwen3_coder": QwenXml,
        "hermes": Hermes,
        "mistral": Mistral,
        "llama3_json": Llama3,
        "gemma": Gemma,
    }
)
"""Formats of calls by name, in the order in which templates are searched for their marks."""
REASONING_PARSERS: Mapping[str, Thinking] = MappingProxyType(
    {
        "gpt_oss": Thinking("<|channel|>analysis<|message|>", "<|end|>"),
        "think": Thinking("<think>", "</think>"),
        "mistral": Thinking("[THINK]", "[/THINK]"),
    }
)
"""Forms of thinking by name, in the order in which templates are searched for their marks."""
_MARKS: Mapping[str, tuple[str, ...]] = {
    "gpt_oss": ("<|channel|>", "<|message|>"),
    "qwen3_coder": ("<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3_json": ("<|eot_id|>", "tools"),
    "gemma": ("<start_of_turn>", "tools"),
}
_THINKING_MARKS: Mapping[str, tuple[str, ...]] = {
    "gpt_oss": _MARKS["gpt_oss"],
    "think": ("<think>",),
    "mistral": ("[THINK]",),
}
_KNOWS_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ReplyFormats:
    """How a model's replies are read; the names of forms, "auto" for the template's, or "none".

    Raises:
        ValueError: for an unknown name.
    """

    tool_call_parser: str = AUTO
    """The form of tool calls: hermes, qwen3_coder, llama3_json, mistral, gemma, gpt_oss, or auto for the chat
    template's."""
    reasoning_parser: str = AUTO
    """The form of thinking: think, mistral, gpt_oss, none to leave it in the text, or auto for the chat template's."""

    def __post_init__(self) -> None:
        check_choice("tool_call_parser", self.tool_call_parser, (AUTO, *TOOL_CALL_PARSERS))
        check_choice("reasoning_parser", self.reasoning_parser, (AUTO, NONE, *REASONING_PARSERS))

    def calls_in(self, template: str) -> str | None:
        """The name of the form of calls in which a template's model writes; None if it is unknown."""
        return _found(template, _MARKS) if self.tool_call_parser == AUTO else self.tool_call_parser

    def thinking_in(self, template: str) -> str | None:
        """The name of the form in which a template's model thinks; None if it does not."""
        if self.reasoning_parser == NONE:
            return None
        return _found(template, _THINKING_MARKS) if self.reasoning_parser == AUTO else self.reasoning_parser


def knows_tools(template: str) -> bool:
    """Whether a template tells the model of tools."""
    return _KNOWS_TOOLS.search(template) is not None


def _found(template: str, marks: Mapping[str, tuple[str, ...]]) -> str | None:
    return next((name for name, texts in marks.items() if all(text in template for text in texts)), None)
