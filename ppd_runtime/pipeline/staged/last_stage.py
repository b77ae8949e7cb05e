"""The last stage decides. Each certain token has gone through every layer, over exactly the certain text."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import (
    MISS,
    Begin,
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
from ppd_runtime.pipeline.speculation_policy import Guessing, SpeculationPolicy
from ppd_runtime.pipeline.staged.arrivals import Arrivals
from ppd_runtime.pipeline.staged.decider import StagedDecider
from ppd_runtime.pipeline.staged.node_passes import run_nodes
from ppd_runtime.pipeline.staged.ports import Logits
from ppd_runtime.pipeline.staged.prompt import ArrivingPrompt
from ppd_runtime.pipeline.staged.tree import Node, NodeTree, RowState
from ppd_runtime.settings.layouts import DECIDER
from ppd_runtime.text import StopRule

_FIRST = 1
_PASSES = 64  # full passes' time to wait for the newest token …
_MOST_DOUBLINGS = 6  # … doubled each time that they were too few
_FIRST_S = 5.0  # until a pass has run here, its time is unknown
_LEAST_S, _LONGEST_S = 0.25, 60.0
_ASKED_FOR_A_PROMPT = 3  # times, before all begin again: the prompt may still be under way
_MOST_ATTEMPTS = 2**20  # at one number of tokens
_MOST_TOKENS = 2**22


class LastStage(StagedDecider):
    """Decodes one request; `num_layers` are the whole model's, `others` the ranks of the stages before this one.

    `listeners` are other ranks, which hear what is certain as stages do, and whose loss matters to nobody.

    With each token the stages hear what to guess after it, by the `policy`. If the first stage has a drafter's network
    (`tells_states`), it also hears what that reads of the token before, and of the prompt (`tells_prompt`).

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
        tells_states: bool = False,
        tells_prompt: bool = False,
        listeners: Sequence[int] = (),
    ) -> None:
        super().__init__(stage, send, begin, policy)
        self.num_layers, self.others, self._listeners = num_layers, tuple(others), tuple(listeners)
        self._tells_states, self._tells_prompt = tells_states, tells_prompt
        # above a predecessor's epochs: the client counts starts, and has its tokens
        self.epoch = (begin.epoch * _MOST_TOKENS + len(begin.delivered)) * _MOST_ATTEMPTS
        self._first_attempt = self.epoch + 1
        self._again = False
        self._prompt = ArrivingPrompt(stage, len(begin.prompt_ids))
        self._finished_pass = 0
        self._arrivals = Arrivals(self._tree)
        self._losses = 0  # losses in a row

    def _end(self, passes_before: int) -> None:
        """End all stages; the first one counts what boundaries named."""
        self.send((*self.others, *self._listeners), End(DECIDER, self.begin.request))
        super()._end(passes_before)

    def _decode(self, stop: StopRule) -> Generator[Awaited, Any, int | None]:
        self.policy.begin()
        self._begin_attempt()
        while True:
            hidden = yield from self._newest_state()
            if hidden is None:
                self.finish_reason = "cancelled"
                return None
            token = self._choose((yield Logits(self.stage, hidden)), stop)
            if self.finish_reason:
                return token
            self.policy.note(len(self.history))
            guessing = self.policy.guessing
            certain = Token(DECIDER, self.begin.request, len(self.history) - 1, token, MISS, guessing=guessing)
            self._tell_stages(certain, hidden)
            self._tell_client(certain)
            self._tell_progress()
            self._tree.settle()

    def _tell_stages(self, certain: Token, hidden: Tensor) -> None:
        if self._tells_states and certain.guessing >= Guessing.EXITS:
            self.send((_FIRST,), replace(certain, hidden=self.stage.told(hidden)))
            self.send([rank for rank in self.others if rank != _FIRST], certain)
        else:
            self.send((*self.others, *self._listeners), certain)

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
            if self._tells_prompt:
                told = self.stage.told(states)
                self.send((_FIRST,), PromptStates(DECIDER, self.begin.request, self.epoch, position, told))
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
        self._tell_attempt((*self.others, *self._listeners))

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

    def _take(self, message: Message) -> None:
        super()._take(message)
        if isinstance(message, Missing):
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
        else:
            self._tell_attempt([rank for rank in (_FIRST, *self._listeners) if rank in ranks])

    def _succeed(self, epoch: int) -> None:
        """A predecessor of this stage had reached this attempt."""
        self.epoch, self._again = epoch, True

    def _answer_missing(self, missing: Missing) -> None:
        """Tell a stage what it lacks: tokens of its attempt, or the prompt, which takes a new attempt."""
        if missing.sender in self._listeners:
            self._tell_attempt((missing.sender,))
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
