"""Chooses the rows of a pass: the certain tokens first, then what is likeliest to follow."""

import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from torch import Tensor

from ppd_runtime.models.checkpoint.hub import one_line
from ppd_runtime.pipeline.speculation_policy import Guessing
from ppd_runtime.pipeline.staged.chances import NETWORK, Guess, GuessRecord, Successors
from ppd_runtime.pipeline.staged.drafters import Draft, Drafter, FromEarlierTexts, OwnText
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.tree import MOST_NODES, Node, NodeTree, number_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SURE = 0.8  # chance of a text's guess beside which a network is not asked
_MOST_STATES = 256  # of tokens that a network has not followed yet
_LEAST_CHANCE = 0.02  # least chance of a path that gets a row


class _Candidate:
    """A token that may enter after a parent, with the chance of its whole path; likelier ones sort first."""

    def __init__(self, chance: float, parent: Node, token: int) -> None:
        self.chance, self.parent, self.token = chance, parent, token

    def __lt__(self, other: "_Candidate") -> bool:
        return self.chance > other.chance


class RowChooser:
    """What may follow the nodes of a request's tree, and which of it enters the next pass.

    Args:
        tree: the nodes; those that are chosen are added. Its `history` holds the certain tokens.
        last_position: position of the last token that another one follows.
        calibration: what earlier requests taught; it is updated.
        repetitions: whether boundary 0 looks for repetitions of the text.
        earlier: texts in which boundary 0 looks, too.
        only_chains: whether a pass' rows form one chain, for devices where others cost a pass each.
        row_cost: what a further row adds to a pass, as a share of the first one's time.
        network: a trained drafter's, which boundary 0 asks too.
    """

    def __init__(
        self,
        tree: NodeTree,
        last_position: int,
        calibration: GuessRecord,
        repetitions: bool,
        only_chains: bool,
        row_cost: float,
        earlier: EarlierTexts | None = None,
        network: NetworkDrafts | None = None,
    ) -> None:
        self.tree, self.last_position, self.calibration = tree, last_position, calibration
        self.only_chains, self.row_cost = only_chains, row_cost
        self.guessing: int = Guessing.NOTHING
        """What to guess, a `Guessing`."""
        self._successors: dict[int, Successors] = {}
        self._drafters: list[Drafter[Any]] = [OwnText()] if repetitions else []
        if earlier is not None:
            self._drafters.append(FromEarlierTexts(earlier))
        self._followed = 0  # certain tokens that the drafters know
        self._network, self._states = network, dict[int, Tensor]()
        self._heard = 1  # position of the first token that the network does not know; it begins with the second one
        self._most_states = _MOST_STATES + len(tree.history)
        if network is not None:
            network.forget()

    def next_is_certain(self) -> bool:
        """Whether a certain token waits for its pass."""
        return self.tree.root.position + 1 < len(self.tree.history)

    def choose(self, rows: int) -> list[Node]:
        """The at most `rows` nodes of the next pass: a certain token, else the likeliest; after them, what needs no
        layer.
        """
        chosen: list[Node] = []
        waiting: list[_Candidate] = []
        if self.next_is_certain():
            chosen.append(self._enter(self.tree.root, self.tree.history[self.tree.root.position + 1]))
            if self.tree.is_newest(chosen[0]):
                waiting = self._candidates_behind(chosen[0], 1.0)
        else:
            waiting = self._candidates()
        if self.only_chains:
            waiting = sorted(waiting)[:1]
        heapq.heapify(waiting)
        while waiting and len(chosen) < min(rows, MOST_NODES - len(self.tree)):
            best = heapq.heappop(waiting)
            if chosen and best.chance < self.row_cost:  # it saves one pass at most
                break
            chosen.append(self._enter(best.parent, best.token, best.chance))
            for further in self._candidates_behind(chosen[-1], best.chance):
                heapq.heappush(waiting, further)
        return chosen

    def name(self, node: Node, boundary: int, guesses: Sequence[Guess]) -> None:
        """A boundary named what may follow a node; without guesses, it was not asked."""
        successors = self._successors.setdefault(node.number, Successors())
        if guesses:
            successors.by_boundary[boundary] = guesses

    def note_states(self, position: int, states: Tensor) -> None:
        """States of certain tokens from a position on, `[tokens, layers, hidden_size]`, that a network reads."""
        if self._network is None:
            return
        for place, state in enumerate(states.split(1), position):
            self._states[place] = state
        while len(self._states) > self._most_states:
            del self._states[next(iter(self._states))]

    def follow_text(self) -> None:
        """Have boundary 0's drafters read the certain tokens that they do not know yet."""
        history = self.tree.history
        if self.guessing < Guessing.REPETITIONS:
            return
        if self._network is not None and self._states:
            newest = min(len(history), max(self._states) + 2)
            for position in range(self._heard, newest):
                self._network.follow(history[position], self._states.pop(position - 1, None))
            self._heard = max(self._heard, newest)
        if self._followed == len(history):
            return
        for _ in self._ask_each(self._tell):
            pass
        self._followed = len(history)

    def name_drafts(self, node: Node, chance: float = 1.0) -> None:
        """Boundary 0: have drafters name what may follow a guess, its path's chance given, or the newest token."""
        if self.guessing < Guessing.REPETITIONS or (node.is_certain and not self.tree.is_newest(node)):
            return
        self.follow_text()
        path = self.tree.guessed(node)
        drafts: dict[int, Draft] = {}
        for draft in chain.from_iterable(self._ask_each(lambda drafter: _drafts_behind(drafter, path))):
            if draft.token not in drafts or draft.said > drafts[draft.token].said:
                drafts[draft.token] = draft
        if drafts:
            likeliest = sorted(drafts.values(), key=lambda draft: -draft.said)
            self.name(node, 0, [(draft.token, draft.said) for draft in likeliest])
        said = max((draft.said for draft in drafts.values()), default=0.0)
        if self._network is None or self.guessing < Guessing.EXITS or node.position >= self.last_position:
            return
        if node is self.tree.prompt or self._heard < len(self.tree.history):  # the first token waits for no network
            return
        if said < _SURE and self._network.is_worth(chance):
            self.name(node, NETWORK, self._network.guesses(path, self.tree.text(node)))

    def forget_dropped(self) -> None:
        """Forget what was named to follow nodes that are gone."""
        alive = {node.number for node in self.tree.alive()}
        self._successors = {number: named for number, named in self._successors.items() if number in alive}

    def learn(self, token: int) -> tuple[bool, int | None]:
        """`token` follows the newest certain node: whether anything was asked there, and the first boundary that named
        the token.
        """
        successors = self._successors.get(self.tree.root.number)
        if successors is None:
            return False, None
        named = successors.first_boundary(token)
        successors.learn(self.calibration, token)
        return True, named

    def _ask_each(self, ask: Callable[[Drafter[Any]], T]) -> Iterator[T]:
        """What each of the text's drafters answers; one that finds no memory is asked no more."""
        for drafter in [*self._drafters]:
            try:
                answer = ask(drafter)
            except MemoryError as error:
                logger.warning("%s guesses no more in this request: %s", type(drafter).__name__, one_line(error))
                self._drafters.remove(drafter)
            else:
                yield answer

    def _tell(self, drafter: Drafter[Any]) -> None:
        """Have a drafter read the certain tokens that it does not know yet."""
        if not self._followed:
            drafter.begin(self.tree.history)
        else:
            for token in islice(self.tree.history, self._followed, None):
                drafter.follow(token)

    def _candidates(self) -> list[_Candidate]:
        """All candidates."""
        found: list[_Candidate] = []
        chances = {self.tree.root.number: 1.0}
        for node in self.tree.alive():  # parents come before their children
            found += self._candidates_behind(node, chances.get(node.number, 0.0), chances)
        return found

    def _candidates_behind(
        self, node: Node, chance: float, of_children: dict[int, float] | None = None
    ) -> list[_Candidate]:
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

    def _enter(self, parent: Node, token: int, chance: float = 1.0) -> Node:
        node = self.tree.add(number_of(parent.number, token), token, parent.position + 1, parent.number)
        assert node is not None, "what enters stands behind a node that may come true"
        self.name_drafts(node, chance)
        return node


def _drafts_behind(drafter: Drafter[Any], path: Sequence[int]) -> Sequence[Draft]:
    """What a drafter names behind guesses that follow the newest certain token."""
    cursor = drafter.newest
    for token in path:
        cursor = drafter.advance(cursor, token)
    return drafter.guesses(cursor)
