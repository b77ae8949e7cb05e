"""Goes through every state of a system, depth first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model_check.automaton import NOTHING, Violation
from model_check.system import Move, State, System


@dataclass
class Explored:
    """How much was seen."""

    states: int = 0
    moves: int = 0
    ends: int = 0
    """States in which nothing more can happen."""
    longest: int = 0
    """Moves from the beginning to an end."""
    is_complete: bool = True

    def __str__(self) -> str:
        more = "" if self.is_complete else " (not all)"
        return f"{self.states:,} states{more}, {self.moves:,} moves, {self.ends:,} ends, longest {self.longest}"


class Counterexample(AssertionError):
    """What happened, move by move, and what is wrong then."""


def explore(
    system: System, deviations: int | None = None, most_states: int | None = None, seen: Callable[[State], None] | None = None
) -> Explored:
    """Go through all that can happen; no path may come back to where it was, and each must end with all tokens.

    Args:
        system: and how many faults.
        deviations: how often somebody else than the fair order says may be next; None: always.
        most_states: where to give up.
        seen: is shown every state once.

    Raises:
        Counterexample: naming every move that led to the violation.
    """
    explored, first = Explored(), system.first()
    left = {first: deviations}
    path: list[Move] = [Move(("start",), first)]
    on_path = {first}
    branches = [_branches(system, path, deviations)]
    while branches:
        explored.longest = max(explored.longest, len(path))
        try:
            move, still = next(branches[-1])
        except StopIteration:
            branches.pop()
            on_path.discard(path.pop().state)
            continue
        explored.moves += 1
        if move.state in on_path:
            raise _counterexample(system, [*path, move], "the same again: it may go on for ever")
        if move.state in left and (still is None or left[move.state] >= still):
            continue
        if len(left) == most_states:
            explored.is_complete = False
            break
        left[move.state] = still
        path.append(move)
        on_path.add(move.state)
        branches.append(_branches(system, path, still))
    explored.states = len(left)
    return explored


def _branches(system: System, path: list[Move], deviations: int | None) -> Iterator[tuple[Move, int | None]]:
    state = path[-1].state
    try:
        moves = system.moves(state)
    except Violation as error:
        raise _counterexample(system, path, str(error)) from error
    if not moves and not system.is_over(state):
        raise _counterexample(system, path, "nobody can go on, and the client has not got everything")
    for number, move in enumerate(moves):
        if deviations is None or number == 0 or move.state.faults < state.faults:
            yield move, deviations
        elif deviations:
            yield move, deviations - 1


def _counterexample(system: System, path: list[Move], what: str) -> Counterexample:
    lines = [_line(system, move) for move in path]
    return Counterexample("\n".join([f"{what}, after:", *lines]))


def _line(system: System, move: Move) -> str:
    words = [str(word) for word in move.name]
    if move.name[0] in ("take", "lose", "double", "swap"):
        number = move.name[3]
        words[3] = "" if number == NOTHING else str(system.messages[number])
    return "  " + " ".join(words)
