"""Answers of `/v1/responses`, whole and as events."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ppd_runtime.results import GenerationResult, TokenEvent
from ppd_runtime.server.answers import Asked, ppd_of, reason_told
from ppd_runtime.server.blocks import Block, Blocks, Step
from ppd_runtime.server.errors import ApiError, as_json, rename
from ppd_runtime.server.responses import ECHOED, RESPONSES_FIELDS, ResponsesRequest


class ResponseAnswer:
    """One response; implements `AnswerForm`."""

    last = b""

    def __init__(self, request: ResponsesRequest, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        self._blocks = Blocks(asked.reading)
        self._events = 0
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": time.time_ns() // 10**9,
            "model": asked.model,
            "error": None,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "text": {"format": request.format},
            "truncation": "disabled",
            "background": False,
            "previous_response_id": None,
            "store": False,
            **{name: getattr(request, name) for name in ECHOED},
        }

    def whole(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Implements `AnswerForm.whole`."""
        (result,) = results
        self._blocks.finish(result.text)
        return self._finished(result)

    def opening(self, number: int) -> list[dict[str, Any]]:
        """Implements `AnswerForm.opening`."""
        begun = self._response("in_progress", [])
        return [self._told("response.created", response=begun), self._told("response.in_progress", response=begun)]

    def piece(self, number: int, event: TokenEvent) -> list[dict[str, Any]]:
        """Implements `AnswerForm.piece`."""
        return self._of_steps(self._blocks.push(event.text))

    def closing(self, number: int, result: GenerationResult) -> list[dict[str, Any]]:
        """Implements `AnswerForm.closing`."""
        events = self._of_steps(self._blocks.finish(result.text))
        response = self._finished(result)
        return [*events, self._told(f"response.{response['status']}", response=response)]

    def ending(self, results: Sequence[GenerationResult]) -> list[dict[str, Any]]:
        """Implements `AnswerForm.ending`."""
        return []

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Implements `AnswerForm.failure`."""
        rename(error, RESPONSES_FIELDS)
        return self._told("error", code=error.code, message=error.message, param=error.param)

    def event(self, content: dict[str, Any]) -> bytes:
        """Implements `AnswerForm.event`."""
        return b"event: " + content["type"].encode() + b"\ndata: " + as_json(content) + b"\n\n"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "incomplete_details": None, "usage": None}

    def _finished(self, result: GenerationResult) -> dict[str, Any]:
        is_cut = reason_told(result) == "length"
        output = [_item(block, "incomplete" if is_cut else "completed") for block in self._blocks.all]
        for item in output[:-1]:
            item["status"] = "completed"
        response = self._response("incomplete" if is_cut else "completed", output)
        details = {"reason": "max_output_tokens"} if is_cut else None
        return {
            **response,
            "incomplete_details": details,
            "usage": self._usage(result),
            "ppd": ppd_of(result, self._asked.shape),
        }

    def _usage(self, result: GenerationResult) -> dict[str, Any]:
        (prompt,), new = self._asked.prompt_tokens, len(result.token_ids)
        thoughts = len(self._tokenizer.encode(self._blocks.thoughts, add_special_tokens=False))
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": result.stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": min(thoughts, new)},
            "total_tokens": prompt + new,
        }

    def _told(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event

    def _of_steps(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        return [event for step in steps for event in self._of_step(step)]

    def _of_step(self, step: Step) -> list[dict[str, Any]]:
        block = step.block
        place: dict[str, Any] = {"item_id": _item_id(block), "output_index": block.index}
        if block.kind == "call":
            of_text, part = "response.function_call_arguments", []
        else:
            of_text = "response.reasoning_text" if block.kind == "thought" else "response.output_text"
            place, part = {**place, "content_index": 0}, [_part(block) if step.what == "ended" else _part(block, "")]
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if step.what == "grew":
            return [self._told(f"{of_text}.delta", **place, delta=step.text, **more)]
        if step.what == "began":
            added = self._told("response.output_item.added", output_index=block.index, item=_item(block, "in_progress"))
            return [added, *(self._told("response.content_part.added", **place, part=one) for one in part)]
        whole = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
        return [
            self._told(f"{of_text}.done", **place, **whole, **more),
            *(self._told("response.content_part.done", **place, part=one) for one in part),
            self._told("response.output_item.done", output_index=block.index, item=_item(block, "completed")),
        ]


def _item_id(block: Block) -> str:
    return f"{ {'thought': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{block.id}"


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item of the output; one that has just begun is empty."""
    item: dict[str, Any] = {"id": _item_id(block), "status": status}
    if block.kind == "call":
        return {**item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "thought":
        return {**item, "type": "reasoning", "summary": [], "content": content}
    return {**item, "type": "message", "role": "assistant", "content": content}


def _part(block: Block, text: str | None = None) -> dict[str, Any]:
    text = block.text if text is None else text
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
