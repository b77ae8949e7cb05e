"""Ordinary decoding that writes given replies: its scores leave one token a step, all else runs as it does."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ppd_runtime import OrdinaryDecoding, SamplingParams
from ppd_runtime.methods.generation import Generation
from ppd_runtime.results import Live


class Written(OrdinaryDecoding):
    """Each request gets the next of `replies` as its text, the last one again and again."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.replies = deque[str]()
        self.prompts: list[str] = []
        """The prompts that were asked for."""

    def request(
        self,
        prompt: Any,
        params: SamplingParams,
        live: int = Live.TOKENS,
        add_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> Generation:
        ids = self.prompt_ids(prompt, add_special_tokens)
        self.prompts.append(self.tokenizer.decode(ids))
        text = self.replies.popleft() if len(self.replies) > 1 else self.replies[0]
        script = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        params = replace(params, logits_processors=(_Script(len(ids), script),))
        return super().request(ids, params, live, shown=shown)


class _Script:
    def __init__(self, prompt_size: int, tokens: Sequence[int]) -> None:
        self._prompt_size, self._tokens = prompt_size, tokens

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = min(token_ids.shape[-1] - self._prompt_size, len(self._tokens) - 1)
        only = torch.full_like(scores, -torch.inf)
        only[..., self._tokens[place]] = 0
        return only
