"""Whether what arrives can be of use to this very model: what the wire format alone cannot tell."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppd_runtime.models.stage.stage import Stage
from ppd_runtime.pipeline.messages import (
    CLIENT,
    Begin,
    Candidate,
    CatchUp,
    Entries,
    ExitState,
    Guesses,
    HeadStart,
    Message,
    PromptStates,
    Rows,
    Token,
)


class MessageValidator:
    """What messages to a worker with this stage hold; their entries are of the first `head_start` layers."""

    def __init__(self, stage: Stage, dtype: torch.dtype, vocab_size: int, head_start: int, num_subs: int) -> None:
        self._stage, self._dtype, self._hidden_size = stage, dtype, stage.model.config.hidden_size
        self._vocab_size, self._head_start, self._num_subs = vocab_size, head_start, num_subs
        self._checks: dict[type[Message], Callable[[Any], bool]] = {
            Begin: self._is_request,
            Token: lambda m: m.token_id < vocab_size and (m.hidden is None or self._are_states(m.hidden, 1)),
            ExitState: lambda m: self._are_states(m.hidden, 1),
            Candidate: lambda m: self._are_tokens(m.token_ids),
            HeadStart: lambda m: self._are_tokens(m.token_ids) and self._are_states(m.hidden, len(m.token_ids)),
            PromptStates: lambda m: m.hidden.dim() == 3 and self._are_states(m.hidden, m.hidden.shape[1]),
            Rows: lambda m: self._are_tokens(m.token_ids) and self._are_states(m.hidden, len(m.nodes)),
            Guesses: lambda m: self._are_tokens(m.token_ids),
            Entries: lambda m: self._are_entries(m.entries),
            CatchUp: lambda m: self._are_tokens(m.token_ids) and (m.entries is None or self._are_entries(m.entries)),
        }

    def takes(self, message: Message) -> bool:
        """Whether sender, tokens and tensors are of this runtime, this vocabulary and the stage's shapes and dtype."""
        check = self._checks.get(type(message))
        return CLIENT <= message.sender <= self._num_subs and (check is None or check(message))

    def _is_request(self, begin: Begin) -> bool:
        named = [token for _, token in begin.params.named_tokens()]
        return all(map(self._are_tokens, (begin.prompt_ids, begin.delivered, named)))

    def _are_tokens(self, token_ids: list[int] | tuple[int, ...]) -> bool:
        return not token_ids or max(token_ids) < self._vocab_size

    def _are_states(self, hidden: Tensor, tokens: int) -> bool:
        return hidden.shape == (1, tokens, self._hidden_size) and hidden.dtype == self._dtype

    def _are_entries(self, entries: Tensor) -> bool:
        shape = (self._head_start, 2, *self._stage.cache.entry_shape(self._head_start))
        return entries.dim() == 5 and entries.shape[1 : 1 + len(shape)] == shape and entries.dtype == self._dtype
