"""Rows that wait for their pass at a stage: certain tokens come first, then the oldest, as long as there is room."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from node_trees import node_tree

from ppd_runtime.pipeline.messages import Rows
from ppd_runtime.pipeline.ports import Work
from ppd_runtime.pipeline.staged.arrivals import Arrivals
from ppd_runtime.pipeline.staged.tree import MOST_HELD, Node, NodeTree

POSITION = 3
"""Behind the prompt."""


@dataclass
class Waiting:
    """A stage's tree behind a prompt of three tokens, and what has come to it."""

    history: list[int] = field(default_factory=lambda: [1, 2, 3])

    def __post_init__(self) -> None:
        self.tree: NodeTree = node_tree(self.history)
        self.arrivals = Arrivals(self.tree)

    def come(self, pass_number: int, nodes: Sequence[int], parents: Sequence[int], position: int = POSITION) -> None:
        """A pass of the stage before has come: nodes, whose tokens are ten times their numbers."""
        size, tokens = len(nodes), tuple(10 * number for number in nodes)
        places = (position,) * size
        self.arrivals.take(
            Rows(1, 1, 0, pass_number, tuple(nodes), tuple(parents), places, tokens, torch.zeros(1, size, 2))
        )

    def run(self) -> list[int]:
        """The next pass has run; the numbers of its nodes."""
        chosen = self.arrivals.next_pass()
        for node in chosen:
            self.tree.note_run(node)
        return [node.number for node in chosen]

    def decide(self, number: int) -> None:
        """This node's token is certain."""
        self.history.append(10 * number)
        self.tree.settle()

    def fill(self, free: int) -> None:
        """Have nodes of the last pass hold all but so much room."""
        numbers = range(1000, 1000 + MOST_HELD - free)
        for number in numbers:
            node = self.tree.add(number, 10 * number, POSITION, 0)
            assert isinstance(node, Node)
            self.tree.note_run(node)


def test_the_oldest_pass_runs_first_and_whole() -> None:
    waiting = Waiting()
    waiting.come(2, [1, 2], [0, 0])
    waiting.come(3, [3], [0])
    assert [waiting.run() for _ in range(3)] == [[1, 2], [3], []]


def test_a_certain_token_is_needed_and_what_it_drops_runs_no_more() -> None:
    waiting = Waiting()
    waiting.come(2, [1], [0])
    assert waiting.run() == [1]
    waiting.come(4, [3, 4], [1, 1], POSITION + 1)
    waiting.come(5, [5, 6], [1, 1], POSITION + 1)
    waiting.come(6, [7], [3], POSITION + 2)
    waiting.decide(1)
    assert waiting.arrivals.work() == Work.SPECULATION, "it has run"
    waiting.decide(5)
    assert waiting.arrivals.work() == Work.NEEDED
    assert waiting.run() == [5]
    assert waiting.arrivals.work() == Work.LITTLE
    assert waiting.run() == []


def test_a_row_waits_for_the_one_that_it_stands_behind() -> None:
    """Both may be of one pass; that of a later pass has to wait for the earlier one's end."""
    waiting = Waiting()
    waiting.come(2, [1], [0])
    waiting.come(2, [2], [1], POSITION + 1)
    waiting.come(3, [3], [2], POSITION + 2)
    assert waiting.arrivals.work() == Work.SPECULATION
    assert [node.number for node in waiting.arrivals.next_pass()] == [1, 2]
    assert waiting.arrivals.work() == Work.LITTLE, "its parent has not run"
    assert waiting.arrivals.next_pass() == []
    for number in (1, 2):
        node = waiting.tree.get(number)
        assert node is not None
        waiting.tree.note_run(node)
    assert waiting.run() == [3]


def test_a_pass_is_cut_where_the_room_ends_and_the_rest_waits_for_a_certain_token() -> None:
    waiting = Waiting()
    waiting.fill(free=3)
    waiting.come(2, [1, 2, 3, 4, 5], [0] * 5)
    assert waiting.run() == [1, 2, 3]
    assert waiting.tree.held == MOST_HELD
    assert waiting.arrivals.work() == Work.LITTLE
    assert waiting.run() == []
    waiting.decide(4)
    assert waiting.arrivals.work() == Work.NEEDED
    assert waiting.run() == [4]
    assert waiting.tree.held == 0


def test_a_certain_token_needs_no_room() -> None:
    """It takes that of what it drops, and stays for good: nothing may keep it waiting."""
    waiting = Waiting()
    waiting.come(2, [1], [0])
    waiting.decide(1)
    waiting.tree.held = MOST_HELD  # as if what it drops were still there
    assert waiting.arrivals.work() == Work.NEEDED
    assert waiting.run() == [1]


def test_states_that_came_by_different_ways_meet_on_one_device() -> None:
    """Large ones may have come on the GPU, and small ones not; `meta` stands for it, as it is no CPU either."""
    waiting = Waiting()
    for number, device in ((1, "meta"), (2, "cpu")):
        rows = Rows(1, 1, 0, 2, (number,), (0,), (POSITION,), (10 * number,), torch.zeros(1, 1, 2, device=device))
        waiting.arrivals.take(rows)
    states = waiting.arrivals.states(waiting.arrivals.next_pass())
    assert (states.shape, states.device.type) == ((1, 2, 2), "meta")
