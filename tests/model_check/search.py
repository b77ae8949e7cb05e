"""Goes through the states of a system: through all of them, or along one path in fair order."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from model_check.automaton import NOTHING, Violation
from model_check.system import Move, State, System
from ppd_runtime.pipeline.messages import MISS, Token
from ppd_runtime.settings.layouts import DECIDER

_MOST_MOVES = 5_000  # of a path; attempts are numbered, so that stages do nothing twice


@dataclass
class Explored:
    """How much was seen."""

    states: int = 0
    moves: int = 0
    ends: int = 0
    """States in which nothing more can happen."""
    longest: int = 0
    """Moves of the longest path."""
    is_complete: bool = True

    def __str__(self) -> str:
        more = "" if self.is_complete else " (not all)"
        return f"{self.states:,} states{more}, {self.moves:,} moves, {self.ends:,} ends, longest path {self.longest}"


class Counterexample(AssertionError):
    """What happened, move by move, and what is wrong then."""


@dataclass(frozen=True)
class Bounds:
    """What a search leaves out, and what it asks for."""

    deviations: int | None = None
    """How often somebody else than the fair order says may be next, faults apart; None: always."""
    fair_behind: int | None = None
    """New tokens behind which no fault happens, who ended is replaced and the order is fair; None: never."""
    hits_behind: int | None = None
    """New tokens of the fair part behind which every candidate must be in time."""
    most_states: int | None = None
    """Where to give up."""


EVERYTHING = Bounds()


class Search:
    """Depth first through all that can happen; no path may come back to where it was, each must end with all tokens."""

    def __init__(self, system: System, bounds: Bounds = EVERYTHING) -> None:
        self._system, self._bounds, self._deviations = system, bounds, bounds.deviations
        first = system.first()
        self._path = [Move("starts", 0, NOTHING, NOTHING, (), first)]
        self._on_path = {first}
        self.left = {first: bounds.deviations}
        """Every state that was seen, with the deviations that were left there."""
        self.explored = Explored()
        self.ends: set[State] = set()

    def run(self) -> Explored:
        """Go through everything.

        Raises:
            Counterexample: naming every move that led to the violation.
        """
        branches = [self._branches(self._deviations)]
        while branches:
            if (branch := next(branches[-1], None)) is None:
                branches.pop()
                self._on_path.discard(self._path.pop().state)
            elif self._is_new(*branch):
                branches.append(self._branches(branch[1]))
            if len(self.left) == self._bounds.most_states:
                self.explored.is_complete = False
                break
        self.explored.states, self.explored.ends = len(self.left), len(self.ends)
        return self.explored

    def _is_new(self, move: Move, left: int | None) -> bool:
        self.explored.moves += 1
        if move.state in self._on_path or len(self._path) > _MOST_MOVES:
            raise counterexample(self._system, [*self._path, move], "the same again, it may go on for ever")
        if move.state in self.left and (left is None or self.left[move.state] >= left):
            return False
        self.left[move.state] = left
        self._path.append(move)
        self._on_path.add(move.state)
        self.explored.longest = max(self.explored.longest, len(self._path))
        return True

    def _branches(self, left: int | None) -> Iterator[tuple[Move, int | None]]:
        state, bounds = self._path[-1].state, self._bounds
        is_fair = bounds.fair_behind is not None and self._system.new_tokens(state) >= bounds.fair_behind
        moves = fair_moves(self._system, self._path) if is_fair else moves_behind(self._system, self._path)
        if is_fair and bounds.hits_behind is not None:
            check_hits(self._system, self._path, moves, bounds.hits_behind)
        if not moves:
            self.ends.add(state)
        for number, move in enumerate(moves):
            if left is None or number == 0 or move.state.faults < self._path[-1].state.faults:
                yield move, left
            elif left:
                yield move, left - 1


def moves_behind(system: System, path: list[Move]) -> list[Move]:
    """What can happen next.

    Raises:
        Counterexample: where nothing can, though the client waits, or where something goes wrong.
    """
    with _told(system, path):
        moves = system.moves(path[-1].state)
    _check_end(system, path, moves)
    return moves


def fair_moves(system: System, path: list[Move]) -> list[Move]:
    """What happens next in fair order without faults, where an ended process is replaced at once; none at the end.

    Raises:
        Counterexample: as `moves_behind`.
    """
    state = path[-1].state._replace(faults=0)
    if births := system.births(state):
        return births[:1]
    with _told(system, path):
        moves = [option() for option in system.options(state)[:1]]
    _check_end(system, path, moves)
    return moves


def moves_by_chance(system: System, path: list[Move], choose: Random, fault_rate: float) -> list[Move]:
    """One of those that can happen next, at this rate a fault; none at the end.

    Raises:
        Counterexample: as `moves_behind`.
    """
    state = path[-1].state
    with _told(system, path):
        if state.faults and choose.random() < fault_rate and (faults := list(system.mishaps(state))):
            return [choose.choice(faults)]
        options = system.options(state)
        moves = [choose.choice(options)()] if options else []
    _check_end(system, path, moves)
    return moves


@contextlib.contextmanager
def _told(system: System, path: list[Move]) -> Iterator[None]:
    try:
        yield
    except Violation as error:
        raise counterexample(system, path, str(error)) from error


def _check_end(system: System, path: list[Move], moves: list[Move]) -> None:
    if not moves and not system.is_over(path[-1].state):
        raise counterexample(system, path, "nobody can go on, and the client has not got everything")


def check_hits(system: System, path: list[Move], moves: list[Move], hits_behind: int) -> None:
    """Every early start has to be in time behind so many new tokens, where all candidates are right."""
    for move in moves:
        for token in (system.messages[number] for address, number in move.sent if address > DECIDER):
            behind = system.scenario.model.prompt_length + hits_behind
            if isinstance(token, Token) and token.position >= behind and token.winner == MISS:
                raise counterexample(system, [*path, move], f"no early start of the token at {token.position}")


def counterexample(system: System, path: list[Move], what: str) -> Counterexample:
    """The path, move by move."""
    return Counterexample("\n  ".join([f"{what}, after:", *map(system.describe, path)]))
