"""All processes together, and all that can happen to them.

A state is a handful of numbers: each process' state in its automaton, and the messages on their way between them.
What may happen next: somebody takes the oldest message from somebody else (so messages of different senders come in
every order), or nothing, where it does not wait for ever; and, as long as faults are left, messages are lost, doubled
and swapped, workers end before or between the messages of a step, and the client asks though nobody is late. A worker
that has ended may be replaced at any time or never, the main process is at some time.
"""

from collections.abc import Iterator
from typing import NamedTuple

from model_check.automaton import NOTHING, Automaton, Edge, Messages, name_of
from model_check.processes import Scenario

from ppd_runtime.pipeline.messages import CLIENT, MAIN

DEAD = -1
Links = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """Equal states have the same futures."""

    nodes: tuple[int, ...]
    """Of the workers by rank, then of the client, in their automata."""
    links: Links
    """Messages on their way, oldest first; from a to b at b * addresses + a."""
    main_lives: int
    faults: int
    """That may still happen."""


class Move(NamedTuple):
    """What can happen next, and the state behind it."""

    name: tuple[object, ...]
    state: State


class System:
    """What can happen in a scenario with so many faults; `faults_of` names the kinds of faults."""

    def __init__(
        self, scenario: Scenario, faults: int = 0, kinds: tuple[str, ...] = ("lose", "double", "swap", "end", "hasten")
    ) -> None:
        self.scenario, self.faults, self.kinds = scenario, faults, kinds
        self.messages = Messages()
        self.size = scenario.num_addresses
        self.client = self.size - 1
        addresses = [*range(self.size - 1), CLIENT]
        self.automata = [Automaton(scenario, address, self.messages) for address in addresses]

    def first(self) -> State:
        """Everybody waits, the first request is on its way."""
        links: Links = ((),) * self.size**2
        return State((0,) * self.size, self._post(links, self.client, self.automata[-1].first_sent), 1, self.faults)

    def is_over(self, state: State) -> bool:
        """Whether the client has got all that it wants."""
        return self.automata[-1].nodes[state.nodes[-1]].over

    def moves(self, state: State) -> list[Move]:
        """All that can happen; where no fault is left, only what all the rest is independent of, if there is that.

        The first is what happens in fair order: whoever can help the main process is quick, nobody loses patience.
        """
        if not state.faults and (alone := self._independent(state)):
            return alone
        ordinary = [move for index in self._fair_order() for move in self._takes(state, index)]
        impatient = [move for index in range(self.client) for move in self._impatience(state, index)]
        births = [move for index in range(self.client) for move in self._births(state, index)]
        if not ordinary and not impatient and not (births and births[0].name[1] == "main"):
            ordinary = self._silence(state)
        return ordinary + impatient + births + (list(self._faults(state)) if state.faults else [])

    def _fair_order(self) -> Iterator[int]:
        return reversed(range(self.size))

    def _takes(self, state: State, index: int) -> Iterator[Move]:
        """A process takes a message, or finds none where it only looks for one."""
        if state.nodes[index] == DEAD:
            return
        for sender in range(self.size):
            if state.links[index * self.size + sender]:
                yield self._take(state, index, sender)
        if self._timeout(state, index) == 0:
            yield self._take(state, index, NOTHING)

    def _impatience(self, state: State, index: int) -> Iterator[Move]:
        if state.nodes[index] != DEAD and self._timeout(state, index):
            yield self._take(state, index, NOTHING)

    def _timeout(self, state: State, index: int) -> float | None:
        return self.automata[index].nodes[state.nodes[index]].timeout

    def _births(self, state: State, index: int) -> Iterator[Move]:
        if state.nodes[index] == DEAD:
            yield Move(("begin", name_of(index)), self._with(state, index, 0, main_lives=index == MAIN))

    def _silence(self, state: State) -> list[Move]:
        """The client's wait is over, unless it has got everything."""
        return [] if self.is_over(state) else [self._take(state, self.client, NOTHING)]

    def _independent(self, state: State) -> list[Move]:
        """All moves of one process, where whatever the others do first leaves it exactly these."""
        for index in self._fair_order():
            if state.nodes[index] == DEAD or (index == self.client and self.is_over(state)):
                continue
            if all(self._is_settled(state, index, sender) for sender in range(self.size)):
                moves = [*self._takes(state, index), *self._impatience(state, index)]
                if moves and (index != self.client or moves[0].state.links[index :: self.size] == state.links[index :: self.size]):
                    return moves[:1] if index == self.client else moves
        return []

    def _is_settled(self, state: State, index: int, sender: int) -> bool:
        """Whether the next message from `sender` is there already, or none ever comes."""
        if sender == index or state.links[index * self.size + sender]:
            return True
        if index == self.client:  # what sub-processes tell it are counts, in any order
            return sender != MAIN
        if sender == self.client:
            alone = not self.faults and self.scenario.requests == 1
            return index != MAIN or alone or self.is_over(state)
        return False

    def _take(self, state: State, index: int, sender: int, most_sent: int | None = None) -> Move:
        """A process takes a message or nothing; with `most_sent`, it ends having sent so many."""
        links, number = state.links, NOTHING
        if sender != NOTHING:
            link = index * self.size + sender
            number, rest = links[link][0], links[link][1:]
            links = (*links[:link], rest, *links[link + 1 :])
        edge = self._edge(state, index, number)
        links = self._post(links, index, edge.sent[:most_sent])
        name = ("take", name_of(self._address(index)), name_of(self._address(sender)), number)
        return Move(name, self._with(state._replace(links=links), index, edge.target))

    def _edge(self, state: State, index: int, number: int) -> Edge:
        lives = state.main_lives if index == self.client else 1
        return self.automata[index].edge(state.nodes[index], (number, lives))

    def _address(self, index: int) -> int:
        return CLIENT if index == self.client else index

    def _post(self, links: Links, sender: int, sent: tuple[tuple[int, int], ...]) -> Links:
        if not sent:
            return links
        changed = list(links)
        for address, number in sent:
            changed[address % self.size * self.size + sender] += (number,)
        return tuple(changed)

    def _with(self, state: State, index: int, node: int, main_lives: int = 0) -> State:
        nodes = (*state.nodes[:index], node, *state.nodes[index + 1 :])
        return state._replace(nodes=nodes, main_lives=state.main_lives + main_lives)

    def _faults(self, state: State) -> Iterator[Move]:
        state = state._replace(faults=state.faults - 1)
        for link, messages in enumerate(state.links):
            if messages:
                yield from self._link_faults(state, link, messages)
        if "end" in self.kinds:
            for index in range(self.client):
                yield from self._ends(state, index)
        if "hasten" in self.kinds and not self.is_over(state):
            yield self._take(state, self.client, NOTHING)

    def _link_faults(self, state: State, link: int, messages: tuple[int, ...]) -> Iterator[Move]:
        first, rest = messages[0], messages[1:]
        changed = {"lose": rest, "double": (*messages, first)}
        if rest and rest[0] != first:
            changed["swap"] = (rest[0], first, *rest[1:])
        for kind, left in changed.items():
            if kind in self.kinds:
                receiver, sender = divmod(link, self.size)
                name = (kind, name_of(self._address(receiver)), name_of(self._address(sender)), first)
                yield Move(name, state._replace(links=(*state.links[:link], left, *state.links[link + 1 :])))

    def _ends(self, state: State, index: int) -> Iterator[Move]:
        """A worker ends: where it is, or in the middle of what it sends; what it has not taken may be lost with it."""
        if state.nodes[index] == DEAD:
            return
        yield from self._end(state, index, ())
        for move in (*self._takes(state, index), *self._impatience(state, index)):
            number = move.name[-1]
            sent = self._edge(state, index, number).sent
            for count in range(1, len(sent)):
                sender = next((s for s in range(self.size) if name_of(self._address(s)) == move.name[2]), NOTHING)
                partly = self._take(state, index, sender if number != NOTHING else NOTHING, count)
                yield from self._end(partly.state, index, (*move.name[2:], "and sends", count))

    def _end(self, state: State, index: int, details: tuple[object, ...]) -> Iterator[Move]:
        state = self._with(state, index, DEAD)
        own = slice(index * self.size, (index + 1) * self.size)
        yield Move(("end", name_of(index), *details), state)
        if any(state.links[own]):
            links = (*state.links[: own.start], *((),) * self.size, *state.links[own.stop :])
            yield Move(("end, all lost", name_of(index), *details), state._replace(links=links))
