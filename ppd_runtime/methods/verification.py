"""Which drafted tokens stay: rules that draw the tokens of a draft and judge them by the whole model's logits.

Both rules are exact samplers: the tokens that stay are distributed like ordinary decoding's. `SharedNoise` gives
ordinary decoding's very tokens; `RejectionSampling` is what the papers use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.request_error import RequestError, no_numbers
from ppd_runtime.sampling.highest import NO_TOKEN
from ppd_runtime.sampling.noise import Draws
from ppd_runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class Verdict:
    """A draft's outcome."""

    path: tuple[int, ...]
    """The nodes that stay, from node 0 downwards."""
    token: int
    """The token after them: the whole model's own."""


class AcceptanceRule(Protocol):
    """Draws the tokens of drafts and judges them, for one request."""

    sampler: Sampler
    """The request's sampler."""

    @property
    def takes_highest_logit(self) -> bool:
        """Whether a choice and a single proposal are the highest logit, with its softmax as confidence."""
        ...

    def choose(self, logits: Tensor, history: Sequence[int]) -> int:
        """The token after `history` without a draft, from the whole model's `[vocab_size]` logits."""
        ...

    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """Up to `most` tokens for the place after `history`, best first, from a draft's `[vocab_size]` logits."""
        ...

    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """What stays of `draft`, whose node 0 is the newest token of `history`.

        `logits` are the whole model's after each node, `[nodes, vocab_size]`. If they choose no token after a later
        node, nothing of the draft stays from there on: the text may end before.

        Raises:
            RequestError: if they choose none after node 0.
        """
        ...


def acceptance_rule(name: str, sampler: Sampler, prompt_length: int = 0, earlier: int = 0) -> AcceptanceRule:
    """The rule called `name`, one of `ACCEPTANCE_RULES`, for one request; greedily both are equality.

    For `prompt_length` and `earlier` see `Draws`.
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
        """Go down while a node has a child that is the whole model's choice."""
        choices = self.sampler.choices(logits)
        if choices is not None:
            return equal_to(choices, draft, len(history))

        def decide(node: int, text: Sequence[int]) -> tuple[int | None, int]:
            token = self.sampler.choose(logits[node], text)
            return draft.child_with(node, token), token

        return _judged(draft, history, decide)


def equal_to(choices: Sequence[int], draft: Draft, position: int) -> Verdict:
    """What stays of `draft` if the whole model chooses `choices` after its nodes, or NO_TOKEN.

    Raises:
        RequestError: if it chooses none after node 0, at `position`.
    """
    if choices[0] == NO_TOKEN:
        raise no_numbers(position)
    path = [0]
    while (child := draft.child_with(path[-1], choices[path[-1]])) is not None:
        path.append(child)
    if choices[path[-1]] == NO_TOKEN:
        return _up_to_last(path, draft)
    return Verdict(tuple(path), choices[path[-1]])


def _judged(
    draft: Draft, history: Sequence[int], decide: Callable[[int, Sequence[int]], tuple[int | None, int]]
) -> Verdict:
    """Go down while `decide` names a child that stays. It gets a node and the text up to it, and also names the token
    after the node.
    """
    path, text = [0], list(history)
    while True:
        try:
            child, token = decide(path[-1], text)
        except RequestError:
            if len(path) == 1:
                raise
            return _up_to_last(path, draft)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        text.append(token)


def _up_to_last(path: Sequence[int], draft: Draft) -> Verdict:
    """What stays if no token is chosen after the last node of a path."""
    return Verdict(tuple(path[:-1]), draft.tokens[path[-1]])


class RejectionSampling:
    """Speculative sampling (Leviathan et al.): a drawn token stays with probability min(1, p/q), else max(p − q, 0).

    p is the whole model's processed distribution, q the draft's. Tokens that were not drawn stay if a draw from p is
    one of them. No random number is used twice, so that thresholds and searches may depend on earlier drafts
    (docs/exactness.md). The numbers come in one order from the request's seed, so a run can be repeated.
    """

    def __init__(self, sampler: Sampler, draws: Draws) -> None:
        self.sampler, self._draws = sampler, draws
        self.takes_highest_logit = False

    def choose(self, logits: Tensor, history: Sequence[int]) -> int:
        """A draw from p."""
        token = self._draws.token(self._law(logits, history))
        self.sampler.note(logits, token, len(history))
        return token

    @torch.inference_mode()
    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """A draw from q; if several are wanted, or q is no distribution, the likeliest, without a draw."""
        chances = self.sampler.distribution(logits, history, guessed=True)
        if most > 1 or chances[0].isnan():
            return _likeliest(chances, most)
        token = self._draws.token(chances)
        return [Proposal(token, float(chances[token]), chances)]

    @torch.inference_mode()
    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """Go down while a child stays."""

        def decide(node: int, text: Sequence[int]) -> tuple[int | None, int]:
            found = self._decide(draft, node, self._law(logits[node], text))
            self.sampler.note(logits[node], found[1], len(text))
            return found

        return _judged(draft, history, decide)

    def _law(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """p; raises RequestError if there is none."""
        chances = self.sampler.distribution(logits, history)
        if chances[0].isnan():
            raise self.sampler.no_choice(logits, len(history))
        return chances

    def _decide(self, draft: Draft, node: int, chances: Tensor) -> tuple[int | None, int]:
        """The child that stays, if any, and the token after `node`."""
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
    """Likeliest tokens; the first is `argmax`'s among equals (`topk`'s may differ)."""
    first = int(chances.argmax())
    if most == 1:
        return [Proposal(first, float(chances[first]))]
    found = chances.topk(min(most, len(chances)))
    others = [p for p in zip(found.indices.tolist(), found.values.tolist(), strict=True) if p[0] != first]
    return [Proposal(token, chance) for token, chance in [(first, float(chances[first])), *others]][:most]
