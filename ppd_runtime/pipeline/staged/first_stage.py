"""The first stage: chooses what enters the pipeline, the certain tokens first, then what is likeliest to follow."""

import heapq
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import BoundaryHead
from ppd_runtime.pipeline.messages import Begin, Foreseen, Guesses, Message, PromptStates, Report
from ppd_runtime.pipeline.ports import Awaited, Call, Machine, Send, WaitFor, Work
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import GuessRecord, Successors, of_message
from ppd_runtime.pipeline.staged.follower import FollowerStage
from ppd_runtime.pipeline.staged.ngrams import LONGEST, Repetitions
from ppd_runtime.pipeline.staged.tree import MOST_NODES, Node, number_of
from ppd_runtime.settings.layouts import CLIENT, DECIDER

_LEAST_CHANCE = 0.02  # least chance of a path that gets a row
_TICK = 1  # layers' time by which later stages may lag this one


class _Candidate:
    """A token that may enter after a parent, with the chance of its whole path; likelier ones sort first."""

    def __init__(self, chance: float, parent: Node, token: int) -> None:
        self.chance, self.parent, self.token = chance, parent, token

    def __lt__(self, other: "_Candidate") -> bool:
        return self.chance > other.chance


class FirstStage(FollowerStage):
    """Serves one request with rows of a tree; see `FollowerStage` for its other arguments.

    Args:
        rows: most rows of a pass.
        calibration: what earlier requests taught; it is updated.
        repetitions: whether there is a boundary 0.
        only_chains: whether a pass' rows form one chain, for devices where others cost a pass each.
        row_cost: what a further row adds to a pass, as a share of the first one's time.
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
    ) -> None:
        super().__init__(stage, head, 1, num_stages, k, send, begin)
        self.num_stages, self.rows, self.only_chains, self.row_cost = num_stages, rows, only_chains, row_cost
        self.calibration, self._has_boundary_0 = calibration or GuessRecord(), repetitions
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

    def _reset(self) -> None:
        self._successors: dict[int, Successors] = {}
        self._repetitions = Repetitions()
        self._pass_number, self._prompt_has_run = 0, False
        self._passes: deque[tuple[int, list[Node]]] = deque(maxlen=self.num_stages)
        self._reached = dict.fromkeys(self._behind(), 0)  # the newest pass that each later stage has finished

    def _attempt(self) -> Machine:
        yield from self._run_prompt()
        while not self._ends:
            yield from self._take_all()
            if not self._next_is_certain():
                self._tell_client()
                if self.guessing != Guessing.NOTHING and (yield from self._keep_step()):
                    yield from self._take_all()
            if self._ends:
                return
            if nodes := self._chosen():
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
        self._follow_text()  # some milliseconds for a long prompt; nobody waits now
        self._name_repetition(self.tree.prompt)

    def _work(self) -> Work:
        is_needed = self._next_is_certain() or not self._prompt_has_run
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
            successors = self._successors.setdefault(node.number, Successors())
            if guesses:
                successors.by_boundary[self.rank] = guesses

    def _keep_step(self) -> Generator[Awaited, Any, bool]:
        """Wait a moment until later stages have finished the passes before this one's last; returns whether it waited.

        All stages take about equally long, and what they say next decides what should run: a guess that comes just
        after a pass began waits for the whole pass.
        """
        wanted, has_waited = WaitFor(_TICK), False
        while not self._ends and not self._next_is_certain() and self._is_ahead():
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

    def _next_is_certain(self) -> bool:
        """Whether a certain token waits for its pass."""
        return self.tree.root.position + 1 < len(self.history)

    def _chosen(self) -> list[Node]:
        """The nodes of the next pass: a certain token, else the likeliest; after them, what needs no layer."""
        chosen: list[Node] = []
        waiting: list[_Candidate] = []
        if self._next_is_certain():
            chosen.append(self._enter(self.tree.root, self.history[self.tree.root.position + 1]))
            if self.tree.is_newest(chosen[0]):
                waiting = self._candidates_behind(chosen[0], 1.0)
        else:
            waiting = self._candidates()
        if self.only_chains:
            waiting = sorted(waiting)[:1]
        heapq.heapify(waiting)
        while waiting and len(chosen) < min(self.rows, MOST_NODES - len(self.tree)):
            best = heapq.heappop(waiting)
            if chosen and best.chance < self.row_cost:  # it saves one pass at most
                break
            chosen.append(self._enter(best.parent, best.token))
            for further in self._candidates_behind(chosen[-1], best.chance):
                heapq.heappush(waiting, further)
        return chosen

    def _candidates(self) -> "list[_Candidate]":
        """All candidates."""
        found: list[_Candidate] = []
        chances = {self.tree.root.number: 1.0}
        for node in self.tree.alive():  # parents come before their children
            found += self._candidates_behind(node, chances.get(node.number, 0.0), chances)
        return found

    def _candidates_behind(
        self, node: Node, chance: float, of_children: dict[int, float] | None = None
    ) -> "list[_Candidate]":
        """Candidates after a node whose whole path has this chance; stores the chances of its children."""
        successors = self._successors.get(node.number) if self.guessing != Guessing.NOTHING else None
        if successors is None or node.position >= self.last_position:
            return []
        found: list[_Candidate] = []
        for token, own in successors.chances(self.calibration).items():
            if (child := node.children.get(token)) is None:
                if chance * own >= _LEAST_CHANCE:
                    found.append(_Candidate(chance * own, node, token))
            elif of_children is not None:
                of_children[child.number] = chance * own
        return found

    def _enter(self, parent: Node, token: int) -> Node:
        node = self.tree.add(number_of(parent.number, token), token, parent.position + 1, parent.number)
        assert node is not None, "what enters stands behind a node that may come true"
        self._name_repetition(node)
        return node

    @property
    def _looks_for_repetitions(self) -> bool:
        return self._has_boundary_0 and self.guessing >= Guessing.REPETITIONS

    def _follow_text(self) -> None:
        if self._looks_for_repetitions:
            self._repetitions.follow(self.history)

    def _name_repetition(self, node: Node) -> None:
        """Boundary 0: what followed the same tokens earlier in the text."""
        if not self._looks_for_repetitions:
            return
        guess = self._repetitions.guess(self.tree.text(node, LONGEST))  # the whole text would be copied
        if guess is not None:
            self._successors.setdefault(node.number, Successors()).by_boundary[0] = [guess]

    def _learn(self, known: int) -> None:
        self._follow_text()
        super()._learn(known)
        alive = {node.number for node in self.tree.alive()}
        self._successors = {number: named for number, named in self._successors.items() if number in alive}

    def _tally(self, token: int) -> None:
        successors, position = self._successors.get(self.tree.root.number), self.tree.root.position + 1
        if successors is None or position <= self._counted_to or self.begin.params.max_new_tokens == 1:
            return
        self._counted_to = position
        named = successors.first_boundary(token)
        boundary = self.num_stages if named is None else named
        self.first_boundary[max(boundary, 1) - 1] += 1  # boundary 0 counts with boundary 1
        successors.learn(self.calibration, token)
        if self.begin.foreseen:
            self._untold.append(Foreseen(self.rank, self.begin.request, position, boundary))

    def _tell_client(self) -> None:
        """Tell what it learned about tokens; nobody waits for it."""
        for told in self._untold:
            self.send((CLIENT,), told)
        self._untold.clear()

    def _take_work(self, message: Message) -> None:
        if not isinstance(message, Guesses):
            return
        self._reached[message.sender] = max(self._reached.get(message.sender, 0), message.pass_number)
        named = of_message(message.token_ids, message.chances, len(message.nodes))
        for number, guesses in zip(message.nodes, named, strict=True):
            if self.tree.get(number) is not None and message.sender != DECIDER:
                self._successors.setdefault(number, Successors()).by_boundary[message.sender] = guesses
