"""All processes together, and all that can happen to them.

A state is a handful of numbers: each process' state in its automaton, and the messages on their way between them.
What may happen next: somebody takes the oldest message from somebody else (so messages of different senders come in
every order), or nothing, where it does not wait for ever; and, as long as faults are left, messages are lost, doubled,
swapped and delayed, workers end before or between the messages that they send, and the client asks though none is
late. A worker that has ended is replaced at any time or never, the main process is at some time.

Of stages everyone is replaced at some time. The last one's patience ends where nothing else can happen, or by a fault.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from model_check.automaton import NOTHING, Automaton, Messages, Node, Violation, name_of
from model_check.processes import Scenario
from ppd_runtime.pipeline.messages import Peers
from ppd_runtime.settings.layouts import CLIENT, DECIDER

DEAD = -1
LINK_FAULTS = ("lose", "double", "swap", "delay")
Links = tuple[tuple[int, ...], ...]


class State(NamedTuple):
    """Equal states have the same futures."""

    nodes: tuple[int, ...]
    """Of the workers by rank, then of the client, in their automata."""
    links: Links
    """Messages on their way, oldest first; from a to b at b * size + a."""
    main_starts: int
    faults: int
    """That may still happen."""


class Move(NamedTuple):
    """What can happen next, and the state behind it."""

    what: str
    who: int
    whose: int
    message: int
    sent: tuple[tuple[int, int], ...]
    """By whom takes a message: addresses and messages."""
    state: State


Option = Callable[[], Move]


class System:
    """What can happen in a scenario with so many faults."""

    def __init__(self, scenario: Scenario, faults: int = 0) -> None:
        self.scenario, self.faults = scenario, faults
        self.reduces = True
        """Whether orders that make no difference are left out."""
        self.messages = Messages()
        self.size = scenario.num_addresses
        self.client = self.size - 1
        self.automata = [Automaton(scenario, address, self.messages) for address in (*range(self.client), CLIENT)]

    def first(self) -> State:
        """Everybody waits, the first request is on its way."""
        state = State((0,) * self.size, ((),) * self.size**2, 1, self.faults)
        return self._sent(state, self.client, self.automata[self.client].first_sent)

    def is_over(self, state: State) -> bool:
        """Whether the client has got all that it wants."""
        return self._node(state, self.client).over

    def new_tokens(self, state: State) -> int:
        """That the main process has chosen or been told."""
        progress = 0 if state.nodes[DECIDER] == DEAD else self._node(state, DECIDER).progress
        return progress - self.scenario.model.prompt_length

    def moves(self, state: State) -> list[Move]:
        """All that can happen; where no fault is left, a part that all the rest is independent of, if there is one."""
        moves = [option() for option in self.options(state)]
        return [*moves, *self.mishaps(state)] if state.faults else moves

    def options(self, state: State) -> list[Option]:
        """What can happen but for faults, each of which somebody has to call for it to happen.

        The first is what happens in fair order: a process that can help the main process is quick. It waits
        uselessly only for those that have nothing to give.
        """
        if self.reduces and not state.faults and (alone := self._independent(state)):
            return alone
        subs = range(self.client - 1, DECIDER, -1)
        options = [
            self._option(state, index, sender)
            for index in (self.client, *subs)
            for sender in self._offers(state, index)
        ]
        options += [self._option(state, index, NOTHING) for index in subs if self._is_impatient(state, index)]
        options += self._all_offers(state, DECIDER)
        births = self.births(state)
        if not options and state.nodes[DECIDER] != DEAD and not self.is_over(state):
            if not self.scenario.staged:
                options.append(self._option(state, self.client, NOTHING))
            elif not births:
                options.append(self._option(state, DECIDER if self._waits(state, DECIDER) else self.client, NOTHING))
        return [*options, *(partial(_same, move) for move in births)]

    def births(self, state: State) -> list[Move]:
        """Restarts of those that have ended."""
        return [Move("begin", index, NOTHING, NOTHING, (), self._begun(state, index)) for index in self._dead(state)]

    def describe(self, move: Move) -> str:
        """The move as a line of a counterexample."""
        who = name_of(self._address(move.who))
        if move.message == NOTHING:
            return f"{who} {move.what}"
        message = f"{name_of(self._address(move.whose))}'s {self.messages[move.message]}"
        return (
            f"{move.what} on the way to {who}: {message}"
            if move.what in LINK_FAULTS
            else f"{who} {move.what} {message}"
        )

    def _node(self, state: State, index: int) -> Node:
        return self.automata[index].nodes[state.nodes[index]]

    def _address(self, index: int) -> int:
        return CLIENT if index == self.client else index

    def _offers(self, state: State, index: int) -> list[int]:
        """Whose messages a process may take next; NOTHING where it only looks for one."""
        if state.nodes[index] == DEAD or self._node(state, index).over:
            return []
        inbox = state.links[index * self.size : (index + 1) * self.size]
        senders = [sender for sender, messages in enumerate(inbox) if messages]
        return [*senders, NOTHING] if self._node(state, index).timeout == 0 else senders

    def _waits(self, state: State, index: int) -> bool:
        """For a message, but not for ever."""
        return state.nodes[index] != DEAD and bool(self._node(state, index).timeout)

    def _is_impatient(self, state: State, index: int) -> bool:
        """Whether it may go on at any time without a message; a last stage waits for longer than anything takes."""
        return self._waits(state, index) and not (self.scenario.staged and index == DECIDER)

    def _dead(self, state: State) -> list[int]:
        return [index for index in range(self.client) if state.nodes[index] == DEAD]

    def _option(self, state: State, index: int, sender: int) -> Option:
        return partial(self._take, state, index, sender)

    def _all_offers(self, state: State, index: int) -> list[Option]:
        """All that a process may do next, but end."""
        offers = self._offers(state, index) + [NOTHING] * self._is_impatient(state, index)
        return [self._option(state, index, sender) for sender in offers]

    def _independent(self, state: State) -> list[Option]:
        """All moves of one process, where whatever the others do first leaves it exactly these."""
        listens = not self.is_over(state) and self._node(state, self.client).timeout != 0
        for sender in range(self.client) if listens else ():
            if state.links[self.client * self.size + sender]:  # where it does not answer at once, it may as well be now
                move = self._take(state, self.client, sender)
                if not move.sent:
                    return [partial(_same, move)]
        settled = (
            index
            for index in reversed(range(self.client))
            if state.nodes[index] != DEAD and all(self._is_settled(state, index, who) for who in range(self.size))
        )
        return next(filter(None, (self._all_offers(state, index) for index in settled)), [])

    def _is_settled(self, state: State, index: int, sender: int) -> bool:
        """Whether the next message from `sender` is there already, or none ever comes."""
        if sender == self.client:
            asks_once = not self.faults and self.scenario.requests == 1
            silent = index != DECIDER or asks_once or self.is_over(state)
        else:
            silent = sender == index or not self._may_hear(index, sender)
        return silent or bool(state.links[index * self.size + sender])

    def _may_hear(self, index: int, sender: int) -> bool:
        """Where nothing goes wrong, the last of three stages hears nothing of the first: that has all from it."""
        is_calm_first = self.scenario.staged and not self.faults and sender == 1 < self.client - 1
        return not is_calm_first or index != DECIDER

    def _take(self, state: State, index: int, sender: int, most_sent: int | None = None) -> Move:
        """A process takes a message or nothing and sends what comes of it, or the first part."""
        message = NOTHING
        if sender != NOTHING:
            link = index * self.size + sender
            message, *rest = state.links[link]
            state = _with_link(state, link, tuple(rest))
        starts = state.main_starts if index == self.client else 1
        edge = self.automata[index].edge(state.nodes[index], (message, starts))
        sent = edge.sent[:most_sent]
        what = "takes" if sender != NOTHING else "hears nothing"
        return Move(what, index, sender, message, sent, self._sent(_with_node(state, index, edge.target), index, sent))

    def _sent(self, state: State, sender: int, sent: tuple[tuple[int, int], ...]) -> State:
        if not sent:
            return state
        links = list(state.links)
        for address, message in sent:
            if not self._may_hear(address % self.size, sender):
                raise Violation(f"{name_of(sender)} sends {self.messages[message]} though nothing went wrong")
            links[address % self.size * self.size + sender] += (message,)
        return state._replace(links=tuple(links))

    def _begun(self, state: State, index: int) -> State:
        starts = state.main_starts + (index == DECIDER)
        state = _with_node(state, index, 0)._replace(main_starts=starts)
        if not self.scenario.staged:
            return state
        known = [rank for rank in range(self.client) if rank != index] if index == DECIDER else [index]
        peers = Peers(CLIENT, 0, known, [""] * len(known))
        return self._sent(state, self.client, self.messages.numbers([(DECIDER, peers)]))

    def mishaps(self, state: State) -> Iterator[Move]:
        """All faults that can happen next."""
        state = state._replace(faults=state.faults - 1)
        for link, messages in enumerate(state.links):
            receiver, sender = divmod(link, self.size)
            mendable = not messages or self._is_mendable(messages[0])
            for what, left in _link_faults(messages) if mendable else ():
                yield Move(what, receiver, sender, messages[0], (), _with_link(state, link, left))
        if self.scenario.mendable:
            return
        for index in range(self.client):
            yield from self._ends(state, index)
        if not self.is_over(state):
            yield self._take(state, self.client, NOTHING)
        if self.scenario.staged and self._waits(state, DECIDER):
            yield self._take(state, DECIDER, NOTHING)

    def _is_mendable(self, message: int) -> bool:
        return not self.scenario.mendable or isinstance(self.messages[message], self.scenario.mendable)

    def _ends(self, state: State, index: int) -> Iterator[Move]:
        """A worker ends where it is, or in the middle of what it sends; what it has not taken may be lost with it."""
        if state.nodes[index] == DEAD:
            return
        yield from self._end(Move("", index, NOTHING, NOTHING, (), state))
        for sender in self._offers(state, index) + [NOTHING] * self._waits(state, index):
            whole = self._take(state, index, sender)
            for count in range(1, len(whole.sent)):
                yield from self._end(self._take(state, index, sender, count))

    def _end(self, move: Move) -> Iterator[Move]:
        words = f"{move.what}, sends {len(move.sent)} and " if move.what else ""
        state = _with_node(move.state, move.who, DEAD)
        yield move._replace(what=f"{words}ends", state=state)
        inbox = slice(move.who * self.size, (move.who + 1) * self.size)
        if any(state.links[inbox]):
            links = list(state.links)
            links[inbox] = ((),) * self.size
            yield move._replace(what=f"{words}ends, its post is lost", state=state._replace(links=tuple(links)))


def _same(move: Move) -> Move:
    return move


def _with_node(state: State, index: int, node: int) -> State:
    return state._replace(nodes=(*state.nodes[:index], node, *state.nodes[index + 1 :]))


def _with_link(state: State, link: int, messages: tuple[int, ...]) -> State:
    return state._replace(links=(*state.links[:link], messages, *state.links[link + 1 :]))


def _link_faults(messages: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What can become of the oldest message on a link."""
    if messages:
        first, *rest = messages
        yield "lose", tuple(rest)
        yield "double", (*messages, first)
        if rest and rest[0] != first:
            yield "swap", (rest[0], first, *rest[1:])
        if len(rest) > 1:
            yield "delay", (*rest, first)
