"""The staged layout in every interleaving of messages, losses and deaths, for few stages and tokens."""

import os
from dataclasses import replace
from random import Random

import pytest
from grids import nightly
from model_check.automaton import NOTHING
from model_check.cases import Case
from model_check.processes import small_world
from model_check.search import Counterexample, counterexample, moves_by_chance
from model_check.staged_cases import (
    LEFT,
    MENDED,
    MISSED,
    ONE_STAGE,
    STAGED_LONGER,
    STAGED_QUICK,
    TWO_AT_ONCE,
    TWO_CANDIDATES,
    TWO_STAGES,
    at_once,
    stages,
)
from model_check.system import Move, System
from seeds import SEED
from torch import Tensor

from ppd_runtime.pipeline.messages import Begin, Peers
from ppd_runtime.pipeline.staged import follower
from ppd_runtime.pipeline.staged.follower import FollowerStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.row_chooser import RowChooser
from ppd_runtime.pipeline.staged.single_stage import SingleStage
from ppd_runtime.pipeline.staged.tree import Node, NodeTree
from ppd_runtime.workers.open_requests import OpenRequests
from ppd_runtime.workers.worker import Worker

WALKS = int(os.environ.get("PPD_WALKS", "0")) // 10 or 6
_MOST_MOVES = 20_000


@pytest.mark.parametrize(
    "case", [*STAGED_QUICK, *(pytest.param(case, marks=nightly) for case in STAGED_LONGER)], ids=lambda case: case.name
)
def test_every_interleaving(case: Case) -> None:
    _, explored = case.search()
    print(explored)
    assert explored.is_complete
    assert explored.ends


def _any_certain_node(self: NodeTree, node: Node) -> bool:
    """Decides behind a token whose successor is not certain yet, or is known already."""
    return node is self.root


def _counted(self: RowChooser, parent: Node, token: int) -> Node | None:
    """Numbers that say nothing of the path: a restarted stage gives them to other nodes."""
    self._count = getattr(self, "_count", 0) + 1
    node = self.tree.add(self._count, token, parent.position + 1, parent.number)
    self.name_drafts(node)
    return node


def _drops_no_descendants(self: NodeTree, node: Node) -> None:
    node.parent.children.pop(node.token)
    self._nodes.pop(node.number)
    node.is_dropped = True
    self._stage.drop(node.number)


def _drops_what_has_run(self: NodeTree, node: Node) -> None:
    """What the pass under way has left in the stage of other nodes stays there."""
    begun = self._stage.begun
    self._stage.begun = {}
    _DROP(self, node)
    self._stage.begun = begun


def _keeps_the_first_branch(self: NodeTree) -> None:
    """Where a branch turns out to be right, and drops that."""
    children, position = self.root.children, self.root.position + 1
    if position < len(self.history) and self.history[position] in children:
        children[self.history[position]] = next(iter(children.values()))
    _SETTLE(self)


def _later_requests_only(self: Worker, begin: Begin) -> bool:
    """A stage that has heard of the end takes part in no further attempt."""
    return begin.request not in self._past


def _any_request(self: Worker, message) -> None:
    """Takes a message for the oldest request's, whichever it is of."""
    if self._sessions and not isinstance(message, Begin | Peers):
        self._step(next(iter(self._sessions.values())), message)
    else:
        _DISPATCH(self, message)


def _all_others_are_over(self: OpenRequests, begin: Begin) -> None:
    _LEARN(self, replace(begin, under_way=()))


def _gaps_and_all(history: list[int], position: int, tokens) -> bool:
    history += tokens[max(len(history) - position, 0) :]
    return True


def _nothing(*_: object) -> None:
    pass


def _behind_any_token(self: SingleStage) -> Tensor | None:
    """Decides again what a predecessor has decided."""
    return self._tree.root.hidden and self._tree.root.hidden.alone()


_SETTLE, _DROP, _DISPATCH, _LEARN = NodeTree.settle, NodeTree._drop, Worker._dispatch, OpenRequests.learn
MUTANTS = (
    (NodeTree, "is_newest", _any_certain_node, TWO_CANDIDATES),
    (RowChooser, "_enter", _counted, MISSED),
    (NodeTree, "_drop", _drops_no_descendants, TWO_CANDIDATES),
    (NodeTree, "_drop", _drops_what_has_run, LEFT),
    (NodeTree, "settle", _keeps_the_first_branch, TWO_CANDIDATES),
    (follower, "merged", _gaps_and_all, MENDED),
    (FollowerStage, "_send_again", _nothing, MENDED),
    (LastStage, "_lose_patience", _nothing, TWO_STAGES),
    (LastStage, "repeat", _nothing, TWO_STAGES),
    (SingleStage, "_decisive", _behind_any_token, ONE_STAGE),
    (SingleStage, "repeat", _nothing, ONE_STAGE),
    (Worker, "_is_new", _later_requests_only, TWO_STAGES),
    (Worker, "_dispatch", _any_request, TWO_AT_ONCE),
    (OpenRequests, "learn", _all_others_are_over, TWO_AT_ONCE),
)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "case"), MUTANTS, ids=[f"{name}-{mutant.__name__}" for _, name, mutant, _ in MUTANTS]
)
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch, owner, name, mutant, case) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Counterexample) as found:
        case.search()
    print(found.value)


@pytest.mark.parametrize("number", range(WALKS))
def test_walks_of_chance(number: int) -> None:
    """Longer texts, more stages and candidates, many faults, and any process may be next."""
    choose = Random(f"{SEED}-{number}")
    size, k = choose.choice([2, 3, 3, 4]), choose.choice([1, 2, 3])
    scenario = stages(
        choose.randint(3, 7),
        size,
        *(choose.randrange(k + 1) for _ in range(4)),
        k=k,
        boundaries=tuple(choose.randrange(1, size) for _ in range(3)),
        rows=choose.choice([1, 1, 3]),
        trees=choose.random() < 0.5,
        requests=choose.choice([1, 2]),
        repeats=choose.random() < 0.5,
        layers=choose.choice([1, 2]),
    )
    if choose.random() < 0.5:
        scenario = at_once(scenario)
    with small_world():
        _walk(System(scenario, choose.choice([0, 2, 8, 30])), choose, choose.choice([0.01, 0.03, 0.1]))


def _walk(system: System, choose: Random, fault_rate: float) -> None:
    path = [Move("starts", 0, NOTHING, NOTHING, (), system.first())]
    while moves := moves_by_chance(system, path, choose, fault_rate):
        path += moves
        if len(path) > _MOST_MOVES:
            raise counterexample(system, path, "no end")
