"""The loop that self-speculative methods share: draft with part of the model, verify with the whole of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ppd_runtime.methods.drafts import Draft, Proposal
from ppd_runtime.methods.verification import AcceptanceRule, Verdict, equal_to
from ppd_runtime.models.checkpoint.description import ModelInfo
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.request_error import RequestError
from ppd_runtime.results import Speculation
from ppd_runtime.text import StopRule
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind


class Propose:
    """A rule's timed proposals for a draft's places."""

    def __init__(self, rule: AcceptanceRule, recorder: Recorder) -> None:
        self._rule, self._recorder = rule, recorder
        self.takes_highest_logit = rule.takes_highest_logit
        """Whether the choice and a single proposal are always the highest logit, with its softmax as confidence."""

    def __call__(self, logits: Tensor, history: Sequence[int], most: int) -> list[Proposal]:
        """Up to `most` tokens for the place behind `history`, best first, from a draft's `[vocab_size]` logits."""
        began = time.perf_counter()
        proposals = self._rule.propose(logits, history, most)
        self._recorder.note(Kind.CHOOSE, began, time.perf_counter(), len(history), proposals[0].token)
        return proposals


class SpeculativeMethod(Protocol):
    """A way of drafting, at work on one sequence at a time; it shares its caches with the whole model."""

    @property
    def draft_cost(self) -> float:
        """c: the layers that a draft step runs, as a share of the model's."""
        ...

    @property
    def steered_by(self) -> int:
        """Earlier requests whose tokens influence the next one's drafts; read before it begins."""
        ...

    def begin(self, capacity: int) -> None:
        """Forget the last sequence; the next has at most `capacity` tokens."""
        ...

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Run the whole model over a prompt: the hidden states after all layers, newest last."""
        ...

    def draft(self, history: Sequence[int], most: int, propose: Propose) -> Draft:
        """A draft at most `most` tokens deep behind `history`, whose newest token has no entries yet.

        It may be verified already, as `verify` would, if the rule takes the highest logit.
        """
        ...

    def verify(self, draft: Draft, position: int) -> Tensor:
        """Run the whole model over a draft whose node 0 is at `position`: `[1, nodes, hidden_size]`."""
        ...

    def keep(self, draft: Draft, path: Sequence[int], history: Sequence[int]) -> None:
        """Keep the entries of the nodes of `path`, drop the others; `history` goes up to the token after them."""
        ...


class MethodSettings(Protocol):
    """Which method, and how."""

    @property
    def pass_kinds(self) -> Sequence[PassKind]:
        """The kinds of passes that the method runs; compiled ones have to be there before it is made."""
        ...

    def prepare(self, info: ModelInfo) -> Callable[[LayerRange], SpeculativeMethod]:
        """Check the settings against a model, before its weights are read; returns a maker of the method.

        Raises:
            ValueError: naming the value and the way out.
        """
        ...


@dataclass
class SpeculationCounts:
    """Counts and times of a request, as it goes."""

    drafted: list[int] = field(default_factory=list)
    """Draft steps of each verification."""
    accepted: list[int] = field(default_factory=list)
    """Drafted tokens that stayed, of each verification."""
    lengths: list[int] = field(default_factory=list)
    """New tokens that the prompt's pass and each verification gave."""
    draft_s: float = 0.0
    verify_s: float = 0.0

    def outcome(self, draft_cost: float) -> Speculation:
        """All of it, for the statistics; `draft_cost` is a draft step's share of a whole pass."""
        return Speculation(tuple(self.drafted), tuple(self.accepted), self.draft_s, self.verify_s, draft_cost)


def speculate(
    method: SpeculativeMethod,
    stage: LayerRange,
    rule: AcceptanceRule,
    prompt_ids: Sequence[int],
    most_tokens: int,
    stop: StopRule,
    progress: SpeculationCounts,
) -> Iterator[tuple[int, bool | None, str | None]]:
    """Yield each new token, whether its draft was right, and with the last one why it is the last.

    Whether a draft was right is None for a token without a draft. `most_tokens` is the most that there will be.
    """
    recorder, history = stage.recorder, list(prompt_ids)
    propose = Propose(rule, recorder)
    method.begin(len(history) + most_tokens)
    states = method.read(history)
    rule.sampler.note_prompt(stage.logits, states, history)
    logits = stage.logits(states)
    began = time.perf_counter()
    token = rule.choose(logits, history)
    recorder.note(Kind.CHOOSE, began, time.perf_counter(), len(history), token)
    history.append(token)
    progress.lengths.append(1)
    reason = stop.finish_reason(token)
    yield token, None, reason
    while reason is None:
        most = len(prompt_ids) + most_tokens - len(history) - 1
        together = stage.most_together(len(history) - 1)
        most = most if together is None else min(most, together - 1)
        try:
            draft, verdict = _round(method, stage, rule, propose, history, most, progress)
        except RequestError:  # a guess's non-finite numbers may have reached those before it
            stage.cache.clear_behind(len(history) - 1)
            draft, verdict = _round(method, stage, rule, propose, history, 0, progress)
        progress.lengths.append(0)
        right: bool | None
        for token, right in _outcome(draft, verdict):
            history.append(token)
            progress.lengths[-1] += 1
            reason = stop.finish_reason(token)
            yield token, right, reason
            if reason is not None:
                return
        method.keep(draft, verdict.path, history)


def _round(
    method: SpeculativeMethod,
    stage: LayerRange,
    rule: AcceptanceRule,
    propose: Propose,
    history: Sequence[int],
    most: int,
    progress: SpeculationCounts,
) -> tuple[Draft, Verdict]:
    began = time.perf_counter()
    draft = method.draft(history, most, propose)
    drafted, verified_before = time.perf_counter(), 0.0
    if verified := draft.verified:
        verdict, chosen = equal_to(verified.choices, draft, len(history)), verified.chosen
        ended, verified_before = time.perf_counter(), verified.chosen[1] - verified.began
    else:
        logits = stage.token_logits(method.verify(draft, len(history) - 1))
        logits_at = time.perf_counter()
        verdict = rule.judge(draft, logits, history)
        ended = time.perf_counter()
        chosen = logits_at, ended
    stage.recorder.note(Kind.CHOOSE, *chosen, len(history), verdict.token)
    progress.drafted.append(draft.steps)
    progress.accepted.append(len(verdict.path) - 1)
    progress.draft_s += drafted - began - verified_before
    progress.verify_s += ended - drafted + verified_before
    return draft, verdict


def _outcome(draft: Draft, verdict: Verdict) -> Iterator[tuple[int, bool | None]]:
    """The tokens that a verification gave, and whether their drafts were right."""
    for node in verdict.path[1:]:
        yield draft.tokens[node], True
    yield verdict.token, False if draft.children(verdict.path[-1]) else None
