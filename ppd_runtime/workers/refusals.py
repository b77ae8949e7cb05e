"""Drops messages that a worker cannot use, and tells the client if a request needs one."""

import logging
import time

from ppd_runtime.pipeline.messages import Begin, CatchUp, Message, PromptStates, Refused, Rows, Token, Unreadable
from ppd_runtime.settings.layouts import CLIENT, StagedLayout
from ppd_runtime.transport import Endpoint
from ppd_runtime.workers.message_validator import MessageValidator
from ppd_runtime.workers.spec import WorkerSpec

logger = logging.getLogger(__name__)
_NEEDED = frozenset(kind.__name__ for kind in (Begin, Token, CatchUp, PromptStates, Rows))
"""The kinds of messages that stages need to decide a token."""
_TELL_AGAIN_S = 0.1  # messages that come together are reported once
_MOST_TOLD = 256  # requests
_MOST_REASON = 1000  # characters


class Refusals:
    """Decides which messages a worker drops.

    A dropped speculative message costs only time, so it is only logged. The client is told of a dropped message that a
    request needs, because the client knows how long to wait for a resend.
    """

    def __init__(self, spec: WorkerSpec, validator: MessageValidator) -> None:
        self._spec, self._validator = spec, validator
        self._told: dict[int, float] = {}  # when, by request

    def refuses(self, message: Message, endpoint: Endpoint) -> bool:
        """Whether to drop a message; a drop is logged, and reported if the message is needed."""
        if isinstance(message, Unreadable):
            kind, fault = message.kind or "message", message.reason
        else:
            kind, fault = type(message).__name__, self._validator.fault(message)
        if not fault:
            return False
        sender = self._spec.layout.named(message.sender)
        logger.warning("left out what %s sent, a %s: %s", sender, kind, fault)
        final = isinstance(message, Begin) and message.sender == CLIENT
        if (final or self._is_needed(message, kind)) and self._may_tell(message.request, final):
            refused = Refused(self._spec.rank, message.request, message.sender, fault[:_MOST_REASON], final)
            endpoint.send(CLIENT, refused)
        return True

    def _is_needed(self, message: Message, kind: str) -> bool:
        layout = self._spec.layout
        if self._spec.rank == layout.drafter or not CLIENT <= message.sender < layout.num_processes:
            return False  # nothing waits for a drafter
        in_stages = isinstance(layout, StagedLayout) and message.sender != layout.drafter
        return message.sender == CLIENT or (in_stages and kind in (*_NEEDED, "message"))

    def _may_tell(self, request: int, final: bool) -> bool:
        """Whether a report is due; limits the reports of one request."""
        now = time.monotonic()
        if not final and now < self._told.get(request, 0.0) + _TELL_AGAIN_S:
            return False
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[request] = now
        return True
