"""Nodes from the previous stage that wait for their pass."""

from collections import deque

import torch
from torch import Tensor

from ppd_runtime.pipeline.messages import Rows
from ppd_runtime.pipeline.ports import Work
from ppd_runtime.pipeline.staged.tree import MOST_HELD, Node, NodeTree, RowState

_MOST_ORPHANS = 64


class Arrivals:
    """Waiting nodes of a tree, in the order in which they came."""

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self._waiting: list[Node] = []
        self._orphans: deque[tuple[Rows, int]] = deque(maxlen=_MOST_ORPHANS)  # rows whose parents have not come

    def take(self, rows: Rows) -> None:
        """Add the nodes of rows that may still become certain."""
        coming = [(rows, row) for row in range(len(rows.nodes))]
        while coming:
            came = [number for rows, row in coming if (number := self._take_row(rows, row)) is not None]
            coming = [(rows, row) for rows, row in self._orphans if rows.parents[row] in came]

    def _take_row(self, rows: Rows, row: int) -> int | None:
        """Add a row's node, or keep the row until its parent comes; returns the number of a new node."""
        number, parent, position = rows.nodes[row], rows.parents[row], rows.positions[row]
        node = self._tree.add(number, rows.token_ids[row], position, parent)
        if node is not None:
            node.hidden, node.pass_number = RowState(rows.hidden, row), rows.pass_number
            self._waiting.append(node)
            return number
        if position > self._tree.root.position + 1 and self._tree.get(parent) is None:
            self._orphans.append((rows, row))
        return None

    def next_pass(self) -> list[Node]:
        """The nodes to run next: of the pass with a certain token, else of the oldest pass; empty if none waits.

        While the stage has no room, uncertain nodes wait until a certain token frees some.
        """
        self._waiting = [node for node in self._waiting if not node.is_dropped]
        ready = self._ready()
        if not ready:
            return []
        first = next((node for node in ready if node.is_certain), ready[0])
        chosen: list[Node] = []
        for node in self._waiting:  # parents come before their children
            fits = node.is_certain or self._tree.held + len(chosen) < MOST_HELD
            if fits and node.pass_number == first.pass_number and (self._is_ready(node) or node.parent in chosen):
                chosen.append(node)
        self._waiting = [node for node in self._waiting if node not in chosen]
        return chosen

    def work(self) -> Work:
        """The kind of work of the next pass."""
        ready = self._ready()
        if any(node.is_certain for node in ready):
            return Work.NEEDED
        return Work.SPECULATION if ready else Work.LITTLE

    @staticmethod
    def states(nodes: list[Node]) -> Tensor:
        """The nodes' input states, `[1, nodes, hidden_size]`."""
        states = [node.hidden for node in nodes if node.hidden is not None]
        rows, places = states[0].rows, [state.row for state in states]
        if any(state.rows is not rows for state in states):
            return torch.cat([state.alone().to(rows.device) for state in states], dim=1)  # some came by other ways
        if places == list(range(places[0], places[-1] + 1)):  # as they came, except dropped ones
            return rows if len(places) == rows.shape[1] else rows[:, places[0] : places[0] + len(places)]
        return rows[:, places]

    def _ready(self) -> list[Node]:
        """The nodes that may run now."""
        has_room = self._tree.held < MOST_HELD
        return [n for n in self._waiting if not n.is_dropped and (has_room or n.is_certain) and self._is_ready(n)]

    def _is_ready(self, node: Node) -> bool:
        return node.parent is None or node.parent.has_run
