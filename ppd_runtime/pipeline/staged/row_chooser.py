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
from ppd_runtime.pipeline.staged.drafters import CERTAIN, Draft, Drafter, FromEarlierTexts, FromGrammar, OwnText
from ppd_runtime.pipeline.staged.earlier_texts import EarlierTexts
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.pipeline.staged.tree import MOST_NODES, Node, NodeTree, number_of
from ppd_runtime.sampling.constraint import Constraint

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SURE = 0.8  # chance of a text's guess beside which a network is not asked
_NEARLY = 0.5  # of the likeliest candidate's chance: a network is asked behind both at once, which reads it once
_MOST_STATES = 256  # of tokens that a network has not followed yet
_AWAITED_CHANCE = 0.1  # least chance of a path for which a pass waits for a draft model's process
_MOST_EARLY = 256  # places that a draft model's process has named tokens for, and the tree has not reached
_LEAST_CHANCE = 0.02  # least chance of a path that gets a pass
_LEAST_OF_FREE = 0.005  # … that gets a further row which costs nothing


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
        network: a drafter's, or a draft model, which boundary 0 asks too.
        constraint: the request's, which names what has to follow, and keeps boundary 0 from naming what cannot.
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
        constraint: Constraint | None = None,
    ) -> None:
        self.tree, self.last_position, self.calibration = tree, last_position, calibration
        self.only_chains, self.row_cost = only_chains, row_cost
        self.guessing: int = Guessing.NOTHING
        """What to guess, a `Guessing`."""
        self._successors: dict[int, Successors] = {}
        self._drafters: list[Drafter[Any]] = [OwnText()] if repetitions else []
        if earlier is not None:
            self._drafters.append(FromEarlierTexts(earlier))
        self._least_chance = _LEAST_CHANCE if row_cost else _LEAST_OF_FREE
        self._grammar = None if constraint is None else FromGrammar(constraint)
        self._followed = 0  # certain tokens that the drafters know
        self._network, self._states = network, dict[int, Tensor]()
        self._heard = 1  # position of the first token that the network does not know; no state is before the first
        if network is not None and not network.reads_states:
            self._heard = 0
        self._most_states = _MOST_STATES + len(tree.history)
        if network is not None:
            network.forget()
        self._early: dict[int, Sequence[Guess]] = {}  # what follows nodes that are not there yet, by their number
        self._drafted = tree.root  # the newest certain token for which the network has spoken

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
            self.name_drafts(chosen[0])
            if self.tree.is_newest(chosen[0]):
                waiting = self._candidates_behind(chosen[0], 1.0)
        else:
            self._draft_again()
            waiting = self._candidates()
        if self.only_chains:
            waiting = sorted(waiting)[:1]
        heapq.heapify(waiting)
        most = min(rows, MOST_NODES - len(self.tree) + len(chosen))
        while waiting and len(chosen) < most:
            likeliest = self._likeliest(waiting, most - len(chosen), bool(chosen))
            if not likeliest:
                break
            entered = [self._enter(one.parent, one.token) for one in likeliest]
            chances = [one.chance for one in likeliest]
            self._name_drafts(entered, chances)
            chosen += entered
            for node, chance in zip(entered, chances, strict=True):
                for further in self._candidates_behind(node, chance):
                    heapq.heappush(waiting, further)
        return chosen

    def name(self, node: Node, boundary: int, guesses: Sequence[Guess]) -> None:
        """A boundary named what may follow a node; without guesses, it was not asked."""
        successors = self._successors.setdefault(node.number, Successors())
        if guesses:
            successors.by_boundary[boundary] = guesses

    def take_draft(self, number: int, guesses: Sequence[Guess]) -> None:
        """A draft model's process named what may follow a node, which may not be there yet."""
        if (node := self.tree.get(number)) is not None and not (node.is_certain and not self.tree.is_newest(node)):
            self.name(node, NETWORK, guesses)
            return
        self._early[number] = guesses
        if len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]

    def lacks_drafts(self, rows: int) -> bool:
        """Whether a draft model's process has yet to name likely rows of a pass over the newest token."""
        position = self.tree.root.position + 1
        if self.guessing < Guessing.EXITS or position != len(self.tree.history) - 1:
            return False
        number, chance = number_of(self.tree.root.number, self.tree.history[-1]), 1.0
        for _ in range(min(rows - 1, self.last_position - position)):
            if number not in self._early:
                return True
            if not (guesses := self._early[number]) or chance * guesses[0][1] < _AWAITED_CHANCE:
                return False
            number, chance = number_of(number, guesses[0][0]), chance * guesses[0][1]
        return False

    def note_states(self, position: int, states: Tensor) -> None:
        """States of certain tokens from a position on, `[tokens, layers, hidden_size]`, that a network reads."""
        if self._network is None or not self._network.reads_states:
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
        if self._network is not None:
            self._tell_network(self._network)
        if self._followed == len(history):
            return
        for _ in self._ask_each(self._tell):
            pass
        self._followed = len(history)

    def _tell_network(self, network: NetworkDrafts) -> None:
        """Have the network read the certain tokens that it does not know yet, as far as their states are there."""
        known = len(self.tree.history)
        if network.reads_states:
            known = min(known, max(self._states, default=-1) + 2)
        for position in range(self._heard, known):
            network.follow(self.tree.history[position], self._states.pop(position - 1, None))
        self._heard = max(self._heard, known)

    def name_drafts(self, node: Node, asks_network: bool = True) -> None:
        """Boundary 0: have drafters name what may follow the newest certain token, if the node is that."""
        self._name_drafts([node], [1.0], asks_network)

    def _name_drafts(self, nodes: Sequence[Node], chances: Sequence[float], asks_network: bool = True) -> None:
        """Have drafters name what may follow nodes, their paths' chances given; a network is asked once for all."""
        if self.guessing < Guessing.REPETITIONS and self._grammar is None:
            return
        self.follow_text()
        doubtful, chance = list[Node](), 0.0
        for node, own in zip(nodes, chances, strict=True):
            if node.is_certain and not self.tree.is_newest(node):
                continue
            if (early := self._early.pop(node.number, None)) is not None and self.guessing >= Guessing.EXITS:
                self.name(node, NETWORK, early)
            if self._name_repetitions(node) < _SURE and node.position < self.last_position:
                doubtful.append(node)
                chance += own
        network = self._network if asks_network and self.guessing >= Guessing.EXITS else None
        if network is None or self._heard < len(self.tree.history) or not doubtful or not network.is_worth(chance):
            return
        paths, texts = [self.tree.guessed(node) for node in doubtful], [self.tree.text(node) for node in doubtful]
        for node, guesses in zip(doubtful, network.guesses(paths, texts), strict=True):
            self._drafted = node if node.is_certain else self._drafted
            self.name(node, NETWORK, guesses)

    def _name_repetitions(self, node: Node) -> float:
        """Have the text's drafters name what may follow a node; returns the highest chance of a guess."""
        text = self.tree.text(node) if self._grammar is not None else ()
        if self._grammar is not None and (forced := self._grammar.guess(text)) is not None:
            self.name(node, 0, [(forced.token, forced.said)])
            return forced.said
        if self.guessing < Guessing.REPETITIONS:
            return 0.0
        path = self.tree.guessed(node)
        drafts: dict[int, Draft] = {}
        for draft in chain.from_iterable(self._ask_each(lambda drafter: _drafts_behind(drafter, path))):
            if self._grammar is not None and not self._grammar.allows(text, draft.token):
                continue
            if draft.token not in drafts or draft.said > drafts[draft.token].said:
                drafts[draft.token] = draft
        likeliest = sorted(drafts.values(), key=lambda draft: -draft.said)
        if likeliest:
            self.name(node, 0, [(draft.token, draft.said) for draft in likeliest])
        return likeliest[0].said if likeliest else 0.0

    def _draft_again(self) -> None:
        """Have the network name what follows the newest certain token, which was a guess when it entered."""
        root, network = self.tree.root, self._network
        if network is None or root is self._drafted:
            return
        self._drafted = root
        named = self._successors.get(root.number)
        if network.reads_states or named is None or NETWORK not in named.by_boundary:
            self.name_drafts(root)

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
        if node.position >= self.last_position:
            return []
        found: list[_Candidate] = []
        for token, own in self._chances_behind(node).items():
            if (child := node.children.get(token)) is None:
                if chance * own >= self._least_chance:
                    found.append(_Candidate(chance * own, node, token))
            elif of_children is not None:
                of_children[child.number] = chance * own
        return found

    def _chances_behind(self, node: Node) -> dict[int, float]:
        """The chance of each token that was named to follow a node; where nothing is guessed, of what has to follow."""
        if (successors := self._successors.get(node.number)) is None:
            return {}
        if self.guessing == Guessing.NOTHING:
            forced = () if self._grammar is None else successors.by_boundary.get(0, ())
            return {token: said for token, said in forced if said == CERTAIN}
        return successors.chances(self.calibration)

    def _likeliest(self, waiting: list[_Candidate], most: int, has_rows: bool) -> list[_Candidate]:
        """Take the likeliest candidate of a heap, and with a network those that are nearly as likely, at most `most`.

        A draft model runs nodes one after the other, so it is asked behind one at a time.
        After a pass' first row, a candidate has to be likelier than a row's cost: it saves one pass at most.
        """
        found: list[_Candidate] = []
        if self._network is None or not self._network.reads_states or self.only_chains:
            most = 1
        while waiting and len(found) < most:
            best = waiting[0]
            if best.chance < (self.row_cost if found or has_rows else _LEAST_CHANCE):
                break
            if found and best.chance < _NEARLY * found[0].chance:
                break
            found.append(heapq.heappop(waiting))
        return found

    def _enter(self, parent: Node, token: int) -> Node:
        node = self.tree.add(number_of(parent.number, token), token, parent.position + 1, parent.number)
        assert node is not None, "what enters stands behind a node that may come true"
        return node


def _drafts_behind(drafter: Drafter[Any], path: Sequence[int]) -> Sequence[Draft]:
    """What a drafter names behind guesses that follow the newest certain token."""
    cursor = drafter.newest
    for token in path:
        cursor = drafter.advance(cursor, token)
    return drafter.guesses(cursor)
