"""Which drafted tokens stay: rules that draw the tokens of a draft and judge them by the whole model's logits.

Both rules are exact samplers: what they let through is distributed as ordinary decoding's tokens are. `SharedNoise`
gives ordinary decoding's very tokens; `RejectionSampling` is what the papers use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.sampling import Draws, Sampler


@dataclass(frozen=True)
class Verdict:
    """What a draft came to."""

    path: tuple[int, ...]
    """The nodes that stay, from node 0 downwards."""
    token: int
    """The token behind them: the whole model's own."""


class AcceptanceRule(Protocol):
    """Draws the tokens of drafts and judges them, for one request."""

    sampler: Sampler
    """The request's."""

    @property
    def takes_highest_logit(self) -> bool:
        """Whether it always takes the highest logit: to choose, and to propose one, its softmax the confidence."""
        ...

    def choose(self, logits: Tensor, history: Sequence[int]) -> int:
        """The token behind `history` where nothing was drafted, from the whole model's `[vocab_size]` logits."""
        ...

    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """Up to `most` tokens for the place behind `history`, best first, from a draft's `[vocab_size]` logits."""
        ...

    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """What stays of `draft`, whose node 0 is the newest token of `history`.

        `logits` are the whole model's behind each node, `[nodes, vocab_size]`.
        """
        ...


def acceptance_rule(name: str, sampler: Sampler, prompt_length: int = 0, earlier: int = 0) -> AcceptanceRule:
    """The rule called `name`, one of `ACCEPTANCE_RULES`, for one request; greedily both are equality.

    `prompt_length` and `earlier` are as `Draws` has them.
    """
    if name == "rejection" and not sampler.params.greedy:
        return RejectionSampling(sampler, Draws(sampler.params.seed, prompt_length, earlier))
    return SharedNoise(sampler)


class SharedNoise:
    """Keeps what ordinary decoding chooses: equality, with draft and model adding the same noise (docs/design.md)."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.takes_highest_logit = sampler.plain and sampler.params.logprobs is None

    def choose(self, logits: Tensor, history: Sequence[int]) -> int:
        """Ordinary decoding's token."""
        return self.sampler.choose(logits, history)

    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """What ordinary decoding would be likeliest to choose if the model ended where the draft did."""
        scores = self.sampler.noisy_scores(logits, history)
        if most == 1:
            return [Proposal(*self.sampler.likeliest(scores))]
        return _likeliest(self.sampler.chances(scores), most)

    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """Goes down while a node has a child that is the whole model's choice."""
        choices = self.sampler.choices(logits)
        if choices is not None:
            return equal_to(choices, draft)
        path, text = [0], list(history)
        while True:
            token = self.sampler.choose(logits[path[-1]], text)
            child = draft.child_with(path[-1], token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            text.append(token)


def equal_to(choices: Sequence[int], draft: Draft) -> Verdict:
    """What stays of `draft` where the whole model chooses `choices` behind its nodes."""
    path = [0]
    while (child := draft.child_with(path[-1], choices[path[-1]])) is not None:
        path.append(child)
    return Verdict(tuple(path), choices[path[-1]])


class RejectionSampling:
    """Speculative sampling (Leviathan et al.): a drawn token stays with probability min(1, p/q), else max(p − q, 0).

    p is the whole model's processed distribution, q the draft's. Tokens that were named outright stay where a draw from
    p is one of them. No random number is used twice, so that thresholds and searches may go by what became of earlier
    drafts (docs/exactness.md); they come in one order from the request's seed, so a run can be repeated.
    """

    def __init__(self, sampler: Sampler, draws: Draws) -> None:
        self.sampler, self._draws = sampler, draws
        self.takes_highest_logit = False

    def choose(self, logits: Tensor, history: Sequence[int]) -> int:
        """A draw from p."""
        token = self._draws.token(self.sampler.distribution(logits, history))
        self.sampler.note(logits, token)
        return token

    @torch.inference_mode()
    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """A draw from q; where several are asked for, or q is no distribution, the likeliest, named outright."""
        chances = self.sampler.distribution(logits, history)
        if most > 1 or chances[0].isnan():
            return _likeliest(chances, most)
        token = self._draws.token(chances)
        return [Proposal(token, float(chances[token]), chances)]

    @torch.inference_mode()
    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """Goes down while a child stays."""
        path, text = [0], list(history)
        while True:
            chances = self.sampler.distribution(logits[path[-1]], text)
            child, token = self._decide(draft, path[-1], chances)
            self.sampler.note(logits[path[-1]], token)
            if child is None:
                return Verdict(tuple(path), token)
            path.append(child)
            text.append(token)

    def _decide(self, draft: Draft, node: int, chances: Tensor) -> tuple[int | None, int]:
        """The child that stays, if any, and the token behind `node`."""
        children = draft.children(node)
        drawn_from = draft.distributions[children[0]] if children else None
        if drawn_from is None:
            token = self._draws.token(chances)
            return draft.child_with(node, token), token
        (child,) = children
        token = draft.tokens[child]
        if self._draws.uniform() * float(drawn_from[token]) < float(chances[token]):
            return child, token
        rest = (chances - drawn_from).clamp(min=0)
        return None, self._draws.token(rest if rest.any() else chances)  # no rest: p is q but for rounding


def _likeliest(chances: Tensor, most: int) -> list[Proposal]:
    """The first of them as `argmax` chooses among equals (`topk` may choose another)."""
    first = int(chances.argmax())
    if most == 1:
        return [Proposal(first, float(chances[first]))]
    found = chances.topk(min(most, len(chances)))
    others = [p for p in zip(found.indices.tolist(), found.values.tolist(), strict=True) if p[0] != first]
    return [Proposal(token, chance) for token, chance in [(first, float(chances[first])), *others]][:most]
