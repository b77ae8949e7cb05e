"""A stage in the middle: runs arriving nodes, certain tokens first, sends on their states, and names successors."""

from collections.abc import Sequence

from ppd_runtime.pipeline.messages import Guesses, Message, Missing, PromptStates, Rows
from ppd_runtime.pipeline.ports import Machine, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.arrivals import Arrivals
from ppd_runtime.pipeline.staged.chances import Guess, in_millionths
from ppd_runtime.pipeline.staged.follower import FollowerStage
from ppd_runtime.pipeline.staged.prompt import ArrivingPrompt
from ppd_runtime.pipeline.staged.tree import Node

_FIRST = 1


class MiddleStage(FollowerStage):
    """Serves one request between its neighbours; see `FollowerStage` for its arguments."""

    def _reset(self) -> None:
        self._prompt = ArrivingPrompt(self.stage, len(self.begin.prompt_ids))
        self._arrivals = Arrivals(self.tree)
        self._has_asked = False

    def _attempt(self) -> Machine:
        while not self._ends:
            yield from self._take_all()
            if self._ends:
                return
            if (position := self._prompt.next_position) is not None:
                yield from self._run_chunk(position)
            elif self._prompt.has_run and (nodes := self._arrivals.next_pass()):
                yield from self._run_arrived(nodes)
            elif (message := (yield WaitFor(None))) is not None:
                self._take(message)

    def _tally(self, token: int) -> None:
        """Does nothing: the first stage counts."""

    def _work(self) -> Work:
        if self._prompt.next_position is not None:
            return Work.NEEDED
        return self._arrivals.work() if self._prompt.has_run else Work.LITTLE

    def _ask_stage_before(self) -> None:
        lacking = self._prompt.lacking(self.tree.root.position + 1)
        self.send((self.rank - 1,), Missing(self.rank, self.begin.request, lacking, self.begin.epoch))

    def _run_chunk(self, position: int) -> Machine:
        states = yield self._prompt.next_chunk()
        self._send_on(PromptStates(self.rank, self.begin.request, self.begin.epoch, position, states))
        if self._prompt.has_run:
            self._name((yield from self._guesses([self.tree.prompt], states[:, -1:])), 0)

    def _run_arrived(self, nodes: list[Node]) -> Machine:
        number = max(node.pass_number for node in nodes)
        nodes, hidden = yield from self._run(nodes, self._arrivals.states(nodes), number)
        if nodes:
            self._name((yield from self._guesses(nodes, hidden)), number)

    def _name(self, named: Sequence[tuple[Node, Sequence[Guess]]], pass_number: int) -> None:
        """While anything is guessed, send the first stage the guesses, which also show this stage's progress."""
        if self.guessing == Guessing.NOTHING:
            return
        named = [(node, of_node) for node, of_node in named if of_node]
        guesses = [guess for _, of_node in named for guess in of_node]
        message = Guesses(
            sender=self.rank,
            request=self.begin.request,
            epoch=self.begin.epoch,
            pass_number=pass_number,
            nodes=tuple(node.number for node, _ in named),
            token_ids=tuple(token for token, _ in guesses),
            chances=in_millionths(guesses),
        )
        self.send((_FIRST,), message)

    def _take_work(self, message: Message) -> None:
        if isinstance(message, PromptStates):
            self._prompt.take(message)
        elif isinstance(message, Rows):
            self._arrivals.take(message)
            if not (self._prompt.has_come or self._has_asked):  # it came to a process before this one, or was lost
                self._has_asked = True
                self._ask_from(0)
