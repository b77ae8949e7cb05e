"""The first stage: chooses what enters the pipeline, the certain tokens first, then what is likeliest to follow."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.messages import Begin, Foreseen, Guesses, Message, PromptStates, Report, Token
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import GuessRecord, of_message
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts
from ppd_runtime.pipeline.staged.follower import FollowerStage
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.row_chooser import RowChooser
from ppd_runtime.pipeline.staged.tree import Node
from ppd_runtime.sampling.constraint import Constraint
from ppd_runtime.settings.layouts import CLIENT, DECIDER

_TICK = 1  # layers' time by which later stages may lag this one
_WAIT_SHARE = 4  # of a pass' time, one in so many parts, for which a draft model's process is waited for


class FirstStage(FollowerStage):
    """Serves one request with rows of a tree; see `FollowerStage` and `RowChooser` for its other arguments.

    Args:
        rows: most rows of a pass.
        drafter: the rank of a draft model's process, which names tokens by itself.
    """

    def __init__(
        self,
        stage: TreeRange,
        head: BoundaryHead,
        num_stages: int,
        k: int,
        rows: int,
        send: Send,
        begin: Begin,
        calibration: GuessRecord | None = None,
        repetitions: bool = True,
        only_chains: bool = False,
        row_cost: float = 0.0,
        earlier: EarlierTexts | None = None,
        network: NetworkDrafts | None = None,
        drafter: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(stage, head, 1, num_stages, k, send, begin)
        self._drafter, self._is_answered = drafter, drafter is not None
        self.num_stages, self.rows = num_stages, rows
        self._network = network
        self._choice = (calibration or GuessRecord(), repetitions, only_chains, row_cost, earlier, network, constraint)
        self.first_boundary = [0] * num_stages
        """Tokens that boundary 1, 2, … was the first to name; last, those that none named."""
        self._counted_to = 0  # position; a new attempt runs its tokens again
        self._untold: list[Foreseen] = []

    def take_turn(self, rows: int, is_alone: bool) -> None:
        """Choose at most `rows`; see `FollowerStage`."""
        super().take_turn(rows, is_alone)
        self.rows = rows

    def serve(self) -> Machine:
        """Follow the request to its end."""
        yield from super().serve()
        self._tell_client()
        if self._network is not None:
            self._network.release()

    def _reset(self) -> None:
        self.chooser = RowChooser(self.tree, self.last_position, *self._choice)
        self.chooser.guessing = self.guessing
        self._pass_number, self._prompt_has_run = 0, False
        self._passes: deque[tuple[int, list[Node]]] = deque(maxlen=self.num_stages)
        self._reached = dict.fromkeys(self._behind(), 0)  # the newest pass that each later stage has finished

    def _take(self, message: Message) -> None:
        if message.sender == self._drafter:
            if isinstance(message, Guesses):
                self._is_answered = True
                named = of_message(message.token_ids, message.chances, len(message.nodes))
                for number, guesses in zip(message.nodes, named, strict=True):
                    self.chooser.take_draft(number, guesses[: self.k])
            return
        if isinstance(message, Token):
            self.chooser.guessing = message.guessing
            if message.hidden is not None:
                self.chooser.note_states(message.position - 1, message.hidden)
        super()._take(message)

    def _attempt(self) -> Machine:
        yield from self._run_prompt()
        while not self._ends:
            yield from self._take_all()
            if not self.chooser.next_is_certain():
                self._tell_client()
                if self.guessing != Guessing.NOTHING and (yield from self._keep_step()):
                    yield from self._take_all()
            elif self._is_answered:
                yield from self._await_drafts()
            if self._ends:
                return
            if nodes := self.chooser.choose(self.rows):
                yield from self._run_chosen(nodes)
            self._tell_client()  # after a pass that others wait for
            if not nodes and (message := (yield WaitFor(None))) is not None:
                self._take(message)

    def _run_prompt(self) -> Machine:
        """Run the prompt's chunks, unless the attempt is over before."""
        prompt = self.begin.prompt_ids
        for chunk in self.stage.prompt_chunks(len(prompt)):
            if chunk.start:
                yield from self._take_all()
            if self._ends:
                return
            states = yield Call(self.stage.run_prompt, prompt[chunk.start : chunk.stop], chunk.start)
            self._send_on(PromptStates(self.rank, self.begin.request, self.begin.epoch, chunk.start, states))
        self._prompt_has_run = True
        yield from self._name([self.tree.prompt], states[:, -1:])
        self.chooser.follow_text()  # some milliseconds for a long prompt; nobody waits now
        self.chooser.name_drafts(self.tree.prompt)

    def _work(self) -> Work:
        is_needed = self.chooser.next_is_certain() or not self._prompt_has_run
        return Work.NEEDED if is_needed else Work.SPECULATION

    def report(self) -> Report:
        """A stage's report, with the boundary that named each token first."""
        return replace(super().report(), first_boundary=tuple(self.first_boundary))

    def _ask_stage_before(self) -> None:
        """There is none."""

    def _run_chosen(self, nodes: list[Node]) -> Machine:
        self._pass_number += 1
        self._passes.append((self._pass_number, nodes))
        nodes, hidden = yield from self._run(nodes, [node.token for node in nodes], self._pass_number)
        yield from self._name(nodes, hidden)

    def _name(self, nodes: Sequence[Node], hidden: Tensor) -> Machine:
        for node, guesses in (yield from self._guesses(nodes, hidden)):
            self.chooser.name(node, self.rank, guesses)

    def _await_drafts(self) -> Machine:
        """Wait a moment for what a draft model names behind a token that nobody foresaw: it enters beside the token.

        One that did not answer in time is not waited for until it has named something again.
        """
        wanted = WaitFor(max(self.stage.num_layers // _WAIT_SHARE, 1))
        while not self._ends and self.chooser.lacks_drafts(self.rows):
            if (message := (yield wanted)) is None:
                self._is_answered = False
                return
            self._take(message)

    def _keep_step(self) -> Generator[Awaited, Any, bool]:
        """Wait a moment until later stages have finished the passes before this one's last; returns whether it waited.

        All stages take about equally long, and what they say next decides what should run: a guess that comes just
        after a pass began waits for the whole pass.
        """
        wanted, has_waited = WaitFor(_TICK), False
        while not self._ends and not self.chooser.next_is_certain() and self._is_ahead():
            message, has_waited = (yield wanted), True
            if message is None:
                break
            self._take(message)
        return has_waited

    def _is_ahead(self) -> bool:
        """Whether a later stage has not finished a pass that is due and has a node that may come true."""
        for number, nodes in self._passes:
            stage = self._pass_number - number  # stages after this one
            if stage == 0:
                continue
            rank = (self.rank + stage) % self.num_stages
            if self._reached[rank] < number and any(map(self._is_open, nodes)):
                return True
        return False

    def _is_open(self, node: Node) -> bool:
        """Whether the node may come true and nothing certain follows it yet."""
        return self.tree.is_newest(node) or not (node.is_dropped or node.is_certain)

    def _behind(self) -> list[int]:
        return [rank % self.num_stages for rank in range(self.rank + 1, self.num_stages + 1)]

    def _learn(self, known: int) -> None:
        self.chooser.follow_text()
        super()._learn(known)
        self.chooser.forget_dropped()

    def _tally(self, token: int) -> None:
        position = self.tree.root.position + 1
        if position <= self._counted_to or self.begin.params.max_new_tokens == 1:
            return
        was_asked, named = self.chooser.learn(token)
        if not was_asked:
            return
        self._counted_to = position
        boundary = self.num_stages if named is None else named
        self.first_boundary[max(boundary, 1) - 1] += 1  # boundary 0 counts with boundary 1
        if self.begin.foreseen:
            self._untold.append(Foreseen(self.rank, self.begin.request, position, boundary))

    def _tell_client(self) -> None:
        """Tell what it learned about tokens; nobody waits for it."""
        for told in self._untold:
            self.send((CLIENT,), told)
        self._untold.clear()

    def _take_work(self, message: Message) -> None:
        if isinstance(message, PromptStates):
            self.chooser.note_states(message.position, message.hidden)
        if not isinstance(message, Guesses):
            return
        self._reached[message.sender] = max(self._reached.get(message.sender, 0), message.pass_number)
        named = of_message(message.token_ids, message.chances, len(message.nodes))
        for number, guesses in zip(message.nodes, named, strict=True):
            if (node := self.tree.get(number)) is not None and message.sender != DECIDER:
                self.chooser.name(node, message.sender, guesses)
