"""Answers of Anthropic's `/v1/messages`, whole and as events."""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppd_runtime.results import GenerationResult, TokenEvent
from ppd_runtime.server.answers import Asked, ppd_of, reason_told
from ppd_runtime.server.blocks import Block, Blocks, Step
from ppd_runtime.server.body import can_be_repeated
from ppd_runtime.server.errors import ApiError, as_json, rename
from ppd_runtime.server.messages import MESSAGES_FIELDS, MessagesRequest
from ppd_runtime.server.token_texts import text_of

_TYPES = {"thought": "thinking", "text": "text", "call": "tool_use"}
_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """One message; implements `AnswerForm`."""

    last = b""

    def __init__(self, request: MessagesRequest, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        self._stops = tuple(request.stop_sequences or ())
        self._asked, self._tokenizer = asked, tokenizer
        self._blocks = Blocks(asked.reading)
        self.id = f"msg_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "type": "message", "role": "assistant", "model": asked.model}

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Implements `AnswerForm.whole`."""
        (result,) = results
        self._blocks.finish(result.text)
        content = [_content(block) for block in self._blocks.all if block.text or block.kind == "call"]
        usage = {**self._input_usage(result), "output_tokens": len(result.token_ids)}
        ppd = ppd_of(result, self._asked.shape)
        return {**self._head, "content": content, **self._reason(result), "usage": usage, "ppd": ppd}

    def opening(self, number: int) -> list[dict[str, Any]]:
        """Implements `AnswerForm.opening`."""
        usage = {"input_tokens": self._asked.prompt_tokens[0], "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": message}]

    def piece(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        """Implements `AnswerForm.piece`."""
        return [_event(step) for step in self._blocks.push(event.text)]

    def closing(self, number: int, result: GenerationResult) -> list[dict[str, Any]]:
        """Implements `AnswerForm.closing`."""
        steps = self._blocks.finish(result.text)
        usage = {**self._input_usage(result), "output_tokens": len(result.token_ids)}
        ppd = ppd_of(result, self._asked.shape)
        delta = {"type": "message_delta", "delta": self._reason(result), "usage": usage, "ppd": ppd}
        return [*map(_event, steps), delta, {"type": "message_stop"}]

    def ending(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """Implements `AnswerForm.ending`."""
        return []

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Implements `AnswerForm.failure`."""
        rename(error, MESSAGES_FIELDS)
        return {"type": "error", **error.body}

    def event(self, content: dict[str, Any]) -> bytes:
        """Implements `AnswerForm.event`."""
        return b"event: " + content["type"].encode() + b"\ndata: " + as_json(content) + b"\n\n"

    def _input_usage(self, result: GenerationResult) -> dict[str, int]:
        cached = result.stats.cached_tokens
        read = self._asked.prompt_tokens[0] - cached
        return {"input_tokens": read, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    def _reason(self, result: GenerationResult) -> dict[str, Any]:
        if reason_told(result) == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(_arguments(call) is not None for call in self._blocks.calls):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if result.finish_reason == "stop" and (found := self._stop_found(result)):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _stop_found(self, result: GenerationResult) -> str | None:
        """Which of the stop texts ended the text."""
        written = text_of(result.token_ids, self._tokenizer)
        places = [(written.find(stop), -len(stop), stop) for stop in self._stops if stop in written]
        return min(places)[2] if places else None


def _arguments(call: Block) -> dict[str, Any] | None:
    """A call's arguments; None if they are no JSON object, as those that were cut short, or hold no finite number."""
    try:
        found = json.loads(call.text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and can_be_repeated(found) else None


def _content(block: Block) -> dict[str, Any]:
    """A whole block; a call whose arguments are none is told as text."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments = _arguments(block)
    if arguments is None:
        return {"type": "text", "text": f"{block.name}: {block.text}"}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _event(step: Step) -> dict[str, Any]:
    block = step.block
    if step.what == "ended":
        return {"type": "content_block_stop", "index": block.index}
    if step.what == "grew":
        kind, field = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, field: step.text}}
    begun: dict[str, Any] = {"type": _TYPES[block.kind]}
    if block.kind == "call":
        begun = {**begun, "id": block.call_id, "name": block.name, "input": {}}
    else:
        begun = {**begun, **({"thinking": "", "signature": ""} if block.kind == "thought" else {"text": ""})}
    return {"type": "content_block_start", "index": block.index, "content_block": begun}
