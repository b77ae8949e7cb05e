"""The common part of all stages but the last: a request's attempts and its certain tokens."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.messages import (
    Begin,
    CatchUp,
    End,
    Guesses,
    Message,
    Missing,
    PromptStates,
    Report,
    Rows,
    Token,
)
from ppd_runtime.pipeline.ports import Awaited, Computation, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import Guess
from ppd_runtime.pipeline.staged.node_passes import run_nodes
from ppd_runtime.pipeline.staged.ports import Naming
from ppd_runtime.pipeline.staged.tree import Node, NodeTree, merged
from ppd_runtime.settings.layouts import DECIDER

_ASK_AGAIN = 8  # tokens or messages later, since the answer may be lost
_MOST_EARLY = 64  # messages kept of an attempt whose `Begin` has not come
_MOST_SENT = 256  # kept rows for the next stage, in case it asks for them again


class FollowerStage(ABC):
    """A stage with a boundary after it, which has the number of the stage's rank. The last stage is DECIDER.

    Args:
        head: names tokens that may follow a node, from the node's state after this stage.
        k: number of candidates that the head names.
        num_stages: number of stages in the layout.
    """

    def __init__(
        self,
        stage: TreeRange,
        head: BoundaryHead,
        rank: int,
        num_stages: int,
        k: int,
        send: Send,
        begin: Begin,
    ) -> None:
        self.stage, self.head, self.rank, self.k, self.send, self.begin = stage, head, rank, k, send, begin
        self.next = (rank + 1) % num_stages
        self.history: list[int] = []
        self.layer_passes = 0
        """The request's layer passes; a row counts as a token."""
        self.tree = NodeTree(stage, [*begin.prompt_ids], len(begin.prompt_ids))
        self._over, self._ask_at = False, 0
        self._again: Begin | None = None  # what the next attempt begins with
        self._early: deque[Message] = deque(maxlen=_MOST_EARLY)
        self._num_early = 0
        self._sent_prompt: list[PromptStates] = []
        self._sent: deque[Rows] = deque(maxlen=_MOST_SENT)
        self.guessing = begin.guessing
        """What to guess after the newest token, a `Guessing`."""
        self.leaves_passes = True
        """Whether speculative passes check between layers for dropped nodes."""

    def take_turn(self, rows: int, is_alone: bool) -> None:
        """Note whether the request is alone: rows of several requests run through all layers of a pass."""
        self.leaves_passes = is_alone

    def serve(self) -> Machine:
        """Follow the request to its end."""
        before = self.stage.layer_passes
        while not self._over:
            self._begin_attempt()
            yield from self._take_all()
            if not self._ends:
                yield from self._attempt()
            self.begin = self._again or self.begin
            self.layer_passes = self.stage.layer_passes - before

    def _begin_attempt(self) -> None:
        self.history = [*self.begin.prompt_ids, *self.begin.delivered]
        self._again, self._ask_at, self._num_early = None, 0, 0
        prompt = self.begin.prompt_ids
        self.stage.begin(len(prompt) + self.begin.params.max_new_tokens, prompt)
        self.tree = NodeTree(self.stage, self.history, len(self.begin.prompt_ids))
        self._sent_prompt.clear()
        self._sent.clear()
        self.guessing = self.begin.guessing
        self._reset()
        early, self._early = self._early, deque(maxlen=_MOST_EARLY)
        for message in early:
            self._take(message)

    @abstractmethod
    def _reset(self) -> None:
        """Forget the attempt before."""

    @abstractmethod
    def _attempt(self) -> Machine:
        """Follow the request until it is over or begins again."""

    @property
    def _ends(self) -> bool:
        """Whether the attempt is over."""
        return self._over or self._again is not None

    @property
    def last_position(self) -> int:
        """Position of the last token that another one follows."""
        return len(self.begin.prompt_ids) + self.begin.params.max_new_tokens - 2

    def report(self) -> Report:
        """This stage's counts of the request."""
        return Report(self.rank, self.begin.request, self.layer_passes, 0)

    @abstractmethod
    def _work(self) -> Work:
        """The kind of work that this stage does next without a message."""

    def _take_all(self) -> Machine:
        while not self._ends and (message := (yield WaitFor(0, work=self._work))) is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, End):
            self._over = True
        elif isinstance(message, Begin):
            self._take_begin(message)
        elif isinstance(message, Token):
            self.guessing = message.guessing
            self._take_tokens(message.position, [message.token_id])
        elif isinstance(message, CatchUp):
            self._take_tokens(message.position, message.token_ids)
        elif isinstance(message, Missing):
            self._send_again(message)
        elif isinstance(message, PromptStates | Rows | Guesses):
            if not isinstance(message, Guesses) and message.sender != self.rank - 1:
                return
            if message.epoch == self.begin.epoch:
                self._take_work(message)
            elif message.epoch > self.begin.epoch:
                self._keep_early(message)

    @abstractmethod
    def _take_work(self, message: Message) -> None:
        """Take a message of this attempt."""

    def _keep_early(self, message: Message) -> None:
        """Keep a message of an attempt whose `Begin` has not come, and ask for the `Begin` from time to time."""
        self._early.append(message)
        if self._num_early % _ASK_AGAIN == 0:
            self._ask_from(len(self.history))
        self._num_early += 1

    def _ask_from(self, position: int) -> None:
        self.send((DECIDER,), Missing(self.rank, self.begin.request, position, self.begin.epoch))

    def _take_begin(self, begin: Begin) -> None:
        if begin.epoch > self.begin.epoch:
            self._again = begin
            return
        self._take_tokens(len(begin.prompt_ids), begin.delivered)
        if begin.epoch == self.begin.epoch:
            self._ask_stage_before()
        if begin.epoch < self.begin.epoch or len(begin.delivered) < len(self.history) - len(begin.prompt_ids):
            self._ask_from(len(self.history))  # a new last stage may not know what came before it

    @abstractmethod
    def _ask_stage_before(self) -> None:
        """Ask the stage before for messages that may have been lost."""

    def _send_on(self, message: PromptStates | Rows) -> None:
        if isinstance(message, Rows):
            self._sent.append(message)
        else:
            self._sent_prompt.append(message)
        self.send((self.next,), message)

    def _send_again(self, missing: Missing) -> None:
        """Send the next stage again the states from its missing position on."""
        if missing.sender != self.next or missing.epoch != self.begin.epoch:
            return
        sent: tuple[PromptStates | Rows, ...] = (*self._sent_prompt, *self._sent)
        for message in sent:
            if _last_position(message) >= missing.position:
                self.send((self.next,), message)

    def _take_tokens(self, position: int, tokens: Sequence[int]) -> None:
        known = len(self.history)
        if not merged(self.history, position, tokens):
            if position >= self._ask_at:
                self._ask_from(known)
                self._ask_at = position + _ASK_AGAIN
        elif len(self.history) > known:
            self._ask_at = 0
            self._learn(known)

    def _learn(self, known: int) -> None:
        """Follow the tokens after the first `known` ones, which have become certain."""
        for position in range(known, len(self.history)):
            if self.tree.root.position == position - 1:
                self._tally(self.history[position])
            self.tree.settle()

    @abstractmethod
    def _tally(self, token: int) -> None:
        """Count which boundary named `token`, which follows the newest certain node."""

    def _look(self) -> Generator[Awaited, Any, bool]:
        """Take messages between the layers of a speculative pass; returns whether the attempt is over."""
        while not self._ends and (message := (yield WaitFor(0, work=_speculation))) is not None:
            self._take(message)
        return self._ends

    def _run(
        self, nodes: Sequence[Node], inputs: Sequence[int] | Tensor, pass_number: int
    ) -> Generator[Awaited, Any, tuple[list[Node], Tensor]]:
        """Run nodes as one pass, and send on those that may still become certain; see `run_nodes`."""
        look = self._look if self.leaves_passes else None
        running, hidden = yield from run_nodes(self.stage, self.tree, nodes, inputs, look)
        if running:
            self._send_rows(running, hidden, pass_number)
        return running, hidden

    def _send_rows(self, nodes: Sequence[Node], hidden: Tensor, pass_number: int) -> None:
        rows = Rows(
            sender=self.rank,
            request=self.begin.request,
            epoch=self.begin.epoch,
            pass_number=pass_number,
            nodes=tuple(node.number for node in nodes),
            parents=tuple(node.behind for node in nodes),
            positions=tuple(node.position for node in nodes),
            token_ids=tuple(node.token for node in nodes),
            hidden=hidden,
        )
        self._send_on(rows)

    def _guesses(
        self, nodes: Sequence[Node], hidden: Tensor
    ) -> Generator[Computation, Sequence[Sequence[Guess]], list[tuple[Node, Sequence[Guess]]]]:
        """Guesses for each node that nothing certain follows yet; `hidden` has a row for each node.

        While exit heads do not guess, the guesses are empty.
        """
        open_ = [
            row
            for row, node in enumerate(nodes)
            if not node.is_dropped
            and node.position <= self.last_position
            and (not node.is_certain or self.tree.is_newest(node))
        ]
        if not open_:
            return []
        named: Sequence[Sequence[Guess]] = [()] * len(open_)
        if self.guessing >= Guessing.EXITS:
            states = hidden if len(open_) == len(nodes) else hidden[:, open_]
            texts = [self.tree.text(nodes[row]) for row in open_]
            named = yield Naming(self.head, self.stage.top(states), texts, self.k)
        return [(nodes[row], guesses) for row, guesses in zip(open_, named, strict=True)]


def _speculation() -> Work:
    return Work.SPECULATION


def _last_position(message: PromptStates | Rows) -> int:
    if isinstance(message, Rows):
        return max(message.positions)
    return message.position + message.hidden.shape[1] - 1
