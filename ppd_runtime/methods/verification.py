"""Which drafted tokens stay: rules that draw the tokens of a draft and judge them by the whole model's logits.

Both rules are exact samplers: what they let through is distributed as ordinary decoding's tokens are. `SharedNoise`
gives ordinary decoding's very tokens; `RejectionSampling` is what the papers use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ppd_runtime.highest import NO_TOKEN
from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.request_error import RequestError, no_numbers
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

        `logits` are the whole model's behind each node, `[nodes, vocab_size]`. Where they choose no token behind a node
        further down, nothing stays of the draft from there on: the text may end before.

        Raises:
            RequestError: where they choose none behind node 0.
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
            return equal_to(choices, draft, len(history))

        def decide(node: int, text: Sequence[int]) -> tuple[int | None, int]:
            token = self.sampler.choose(logits[node], text)
            return draft.child_with(node, token), token

        return _judged(draft, history, decide)


def equal_to(choices: Sequence[int], draft: Draft, position: int) -> Verdict:
    """What stays of `draft` where the whole model chooses `choices` behind its nodes, or NO_TOKEN.

    Raises:
        RequestError: where it chooses none behind node 0, for `position`.
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
    """Goes down while `decide` names a child that stays; it is given a node and the text up to it, and names the token
    behind it too.
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
    """What stays where no token is chosen behind the last node of a path."""
    return Verdict(tuple(path[:-1]), draft.tokens[path[-1]])


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
        token = self._draws.token(self._law(logits, history))
        self.sampler.note(logits, token, len(history))
        return token

    @torch.inference_mode()
    def propose(self, logits: Tensor, history: Sequence[int], most: int = 1) -> list[Proposal]:
        """A draw from q; where several are asked for, or q is no distribution, the likeliest, named outright."""
        chances = self.sampler.distribution(logits, history, guessed=True)
        if most > 1 or chances[0].isnan():
            return _likeliest(chances, most)
        token = self._draws.token(chances)
        return [Proposal(token, float(chances[token]), chances)]

    @torch.inference_mode()
    def judge(self, draft: Draft, logits: Tensor, history: Sequence[int]) -> Verdict:
        """Goes down while a child stays."""

        def decide(node: int, text: Sequence[int]) -> tuple[int | None, int]:
            found = self._decide(draft, node, self._law(logits[node], text))
            self.sampler.note(logits[node], found[1], len(text))
            return found

        return _judged(draft, history, decide)

    def _law(self, logits: Tensor, history: Sequence[int]) -> Tensor:
        """p; raises RequestError where there is none."""
        chances = self.sampler.distribution(logits, history)
        if chances[0].isnan():
            raise self.sampler.no_choice(logits, len(history))
        return chances

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
