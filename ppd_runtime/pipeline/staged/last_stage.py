"""The last stage decides. Each certain token has gone through every layer, over exactly the certain text."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import (
    MISS,
    NOT_ASKED,
    Begin,
    Cancel,
    CatchUp,
    End,
    Guesses,
    Message,
    Missing,
    Peers,
    PromptStates,
    Rows,
    Token,
)
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Always, Guessing, SpeculationPolicy
from ppd_runtime.pipeline.staged.arrivals import Arrivals
from ppd_runtime.pipeline.staged.node_passes import run_nodes
from ppd_runtime.pipeline.staged.ports import Logits
from ppd_runtime.pipeline.staged.prompt import ArrivingPrompt
from ppd_runtime.pipeline.staged.tree import Node, NodeTree, RowState
from ppd_runtime.request_error import RequestError
from ppd_runtime.sampling.logprobs import TokenLogprobs, packed
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import CLIENT, DECIDER
from ppd_runtime.text import StopRule

_FIRST = 1
_PASSES = 64  # full passes' time to wait for the newest token …
_MOST_DOUBLINGS = 6  # … doubled each time that they were too few
_FIRST_S = 5.0  # until a pass has run here, its time is unknown
_LEAST_S, _LONGEST_S = 0.25, 60.0
_ASKED_FOR_A_PROMPT = 3  # times, before all begin again: the prompt may still be under way
_MOST_ATTEMPTS = 2**20  # at one number of tokens
_MOST_TOKENS = 2**22


class LastStage:
    """Decodes one request; `num_layers` are the whole model's, `others` the ranks of the stages before this one.

    With each token the stages hear what to guess after it, by the `policy`.

    What takes longer than it can is lost. First this stage repeats what is certain, and each stage asks the one before
    it for what may be lost; then it begins another attempt.
    """

    def __init__(
        self,
        stage: TreeRange,
        num_layers: int,
        others: Sequence[int],
        send: Send,
        begin: Begin,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.stage, self.num_layers, self.others, self.send = stage, num_layers, tuple(others), send
        self.begin, self.policy = begin, policy or Always(Guessing.EXITS)
        self.history = [*begin.prompt_ids, *begin.delivered]
        self.told: list[Token] = []
        """What the client has been sent, in case it asks for it again."""
        self.finish_reason = ""
        # above a predecessor's epochs: the client counts starts, and has its tokens
        self.epoch = (begin.epoch * _MOST_TOKENS + len(begin.delivered)) * _MOST_ATTEMPTS
        self._first_attempt = self.epoch + 1
        self.layer_passes = 0
        """The request's layer passes; a row counts as a token."""
        self.cached_tokens = 0
        """Prompt tokens whose entries were kept from an earlier prompt, at the first attempt."""
        self._delivered = len(begin.delivered)
        self._cancelled = self._again = False
        self._prompt = ArrivingPrompt(stage, len(begin.prompt_ids))
        self._sampler = Sampler(begin.params)
        self._finished_pass = 0
        self._tree = NodeTree(stage, self.history, len(begin.prompt_ids))
        self._arrivals = Arrivals(self._tree)
        self._logprobs: tuple[TokenLogprobs, ...] = ()  # the newest token's
        self._losses = 0  # losses in a row

    def decode(self, sampler: Sampler, stop: StopRule) -> Machine:
        """Decode to the end, telling each token to the stages and the client as soon as it is certain."""
        before = self.stage.layer_passes
        reasons = [stop.finish_reason(token) for token in self.begin.delivered]
        self.finish_reason = (reasons[-1] if reasons else "") or ""
        try:
            last = None if self.finish_reason else (yield from self._decode(sampler, stop))
        except RequestError:
            self._end(before)
            raise
        self._end(before)
        if last is not None:
            self._tell_client(Token(DECIDER, self.begin.request, len(self.history) - 1, last, NOT_ASKED))

    def _end(self, passes_before: int) -> None:
        """End all stages."""
        self.send(self.others, End(DECIDER, self.begin.request))
        self.layer_passes = self.stage.layer_passes - passes_before

    def counts(self) -> dict[str, Any]:
        """Fields of `PathStats`; the first stage counts what boundaries named."""
        return {"main_layer_passes": self.layer_passes, "cached_tokens": self.cached_tokens}

    def repeat(self, delivered: int) -> None:
        """Send the client again what follows the first `delivered` tokens after the prompt."""
        for message in self.told[max(delivered - self._delivered, 0) :]:
            self.send((CLIENT,), message)

    def _decode(self, sampler: Sampler, stop: StopRule) -> Generator[Awaited, Any, int | None]:
        """Decode to the end; returns the last token, which is not sent yet, or None after a cancel."""
        self._sampler = sampler
        self.policy.begin()
        self._begin_attempt()
        while True:
            hidden = yield from self._newest_state()
            if hidden is None:
                self.finish_reason = "cancelled"
                return None
            token = sampler.choose((yield Logits(self.stage, hidden)), self.history)
            self._logprobs = sampler.take_logprobs()
            self.history.append(token)
            self.finish_reason = stop.finish_reason(token) or ""
            if self.finish_reason:
                return token
            self.policy.note(len(self.history))
            guessing = self.policy.guessing
            certain = Token(DECIDER, self.begin.request, len(self.history) - 1, token, MISS, guessing=guessing)
            self.send(self.others, certain)
            self._tell_client(certain)
            self._tell_progress()
            self._tree.settle()

    def _tell_client(self, token: Token) -> None:
        if self._logprobs:
            logprobs, top_ids = packed(self._logprobs)
            token = replace(token, logprobs=logprobs, top_ids=top_ids)
        self.told.append(token)
        self.send((CLIENT,), token)

    def _newest_state(self) -> Generator[Awaited, Any, Tensor | None]:
        """The newest token's hidden state after all layers, `[1, 1, hidden_size]`; None after a cancel."""
        wanted = self._patience()
        while True:
            yield from self._take_all()
            if self._cancelled:
                return None
            if self._again:
                self._begin_attempt()
                wanted = self._patience()
            if (hidden := self._decisive()) is not None:
                return hidden
            self._tell_progress()
            if (yield from self._advance()):
                self._losses = 0
                if (hidden := self._decisive()) is not None:
                    return hidden  # all wait for the decision: messages come after it
                wanted = self._patience()
            elif (message := (yield wanted)) is not None:
                self._take(message)
            else:
                self._lose_patience()
                wanted = self._patience()

    def _decisive(self) -> Tensor | None:
        """The newest token's hidden state, once it is there."""
        root = self._tree.root
        if root.hidden is None or not root.has_run or not self._tree.is_newest(root):
            return None
        return root.hidden.alone()

    def _work(self) -> Work:
        if self._cancelled or self._again or self._decisive() is not None:
            return Work.LITTLE
        if self._prompt.next_position is not None:
            return Work.NEEDED
        return self._arrivals.work() if self._prompt.has_run else Work.LITTLE

    def _advance(self) -> Generator[Awaited, Any, bool]:
        """Run what waits, certain first; returns whether any ran."""
        if (position := self._prompt.next_position) is not None:
            states = yield self._prompt.next_chunk()
            if self.epoch == self._first_attempt:
                self.cached_tokens = self.stage.cached_tokens
            if len(self.history) == len(self.begin.prompt_ids):
                yield Call(self._sampler.note_prompt, self.stage.logits, states, self.history, position)
            self._tree.prompt.hidden = RowState(states, states.shape[1] - 1) if self._prompt.has_run else None
            return True
        nodes = self._arrivals.next_pass() if self._prompt.has_run else []
        if nodes:
            yield from self._run(nodes)
        return bool(nodes)

    def _run(self, nodes: list[Node]) -> Machine:
        nodes, hidden = yield from run_nodes(self.stage, self._tree, nodes, self._arrivals.states(nodes), None)
        for row, node in enumerate(nodes):
            node.hidden = RowState(hidden, row)
        self._finished_pass = max(node.pass_number for node in nodes)

    def _tell_progress(self) -> None:
        """Tell the first stage which pass is finished, after the decision, for which it waits.

        If nothing is guessed, it is not told.
        """
        if self._finished_pass and self.policy.guessing != Guessing.NOTHING:
            self.send((_FIRST,), Guesses(DECIDER, self.begin.request, self.epoch, self._finished_pass, (), (), ()))
        self._finished_pass = 0

    def _begin_attempt(self) -> None:
        """Have all stages begin with what is certain."""
        self.epoch += 1
        self._again = False
        prompt_size = len(self.begin.prompt_ids)
        self.stage.begin(prompt_size + self.begin.params.max_new_tokens, self.begin.prompt_ids)
        self._tree = NodeTree(self.stage, self.history, prompt_size)
        self._arrivals, self._prompt = Arrivals(self._tree), ArrivingPrompt(self.stage, prompt_size)
        self._tell_attempt(self.others)

    def _tell_attempt(self, stages: Sequence[int]) -> None:
        """Tell how the attempt begins; a stage that knows it learns the new certain tokens."""
        certain = self.history[len(self.begin.prompt_ids) :]
        guessing = self.policy.guessing
        self.send(stages, replace(self.begin, sender=DECIDER, delivered=certain, epoch=self.epoch, guessing=guessing))

    def _lose_patience(self) -> None:
        self._losses += 1
        times = 1 if self._prompt.has_begun else _ASKED_FOR_A_PROMPT
        if self._losses % (times + 1):
            lacking = self._prompt.lacking(self._tree.root.position + 1)
            self._tell_attempt(self.others)
            self.send((max(self.others),), Missing(DECIDER, self.begin.request, lacking, self.epoch))
        else:
            self._again = True

    def _patience(self) -> WaitFor:
        """How long to wait: at least the whole text's time once more, doubled after each loss."""
        doublings = min(self._losses, _MOST_DOUBLINGS)
        least_s = _LEAST_S if self.stage.layer_passes else _FIRST_S
        passes = _PASSES + len(self.history)
        return WaitFor(self.num_layers * passes << doublings, min(least_s * 2**doublings, _LONGEST_S))

    def _take_all(self) -> Machine:
        while (message := (yield WaitFor(0, work=self._work))) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, Cancel):
            self._cancelled = True
        elif isinstance(message, Begin):
            self.repeat(len(message.delivered))
        elif isinstance(message, Missing):
            self._answer_missing(message)
        elif isinstance(message, Peers):
            self._welcome(message.addresses)
        elif isinstance(message, PromptStates | Rows) and message.sender == max(self.others):
            self._take_states(message)

    def _take_states(self, message: PromptStates | Rows) -> None:
        if message.epoch > self.epoch:
            self._succeed(message.epoch)
        elif message.epoch < self.epoch:
            return
        elif isinstance(message, PromptStates):
            self._prompt.take(message)
        elif not self._prompt.has_come:  # they came to a predecessor, or nowhere
            self._again = True
        else:
            self._arrivals.take(message)

    def _welcome(self, ranks: Sequence[int]) -> None:
        """Bring in restarted stages, which know nothing; a first stage sends everything again."""
        if set(ranks) & set(self.others) - {_FIRST}:
            self._again = True
        elif _FIRST in ranks:
            self._tell_attempt((_FIRST,))

    def _succeed(self, epoch: int) -> None:
        """A predecessor of this stage had reached this attempt."""
        self.epoch, self._again = epoch, True

    def _answer_missing(self, missing: Missing) -> None:
        """Tell a stage what it lacks: tokens of its attempt, or the prompt, which takes a new attempt."""
        if missing.sender not in self.others:
            return
        if missing.epoch > self.epoch or (missing.epoch == self.epoch and missing.position > len(self.history)):
            self._succeed(missing.epoch)
        elif missing.epoch < self.epoch:
            self._tell_attempt((missing.sender,))
        elif missing.position < len(self.begin.prompt_ids):
            self._again = True
        elif missing.position < len(self.history):
            tokens = self.history[missing.position :]
            self.send((missing.sender,), CatchUp(DECIDER, self.begin.request, missing.position, tokens))
