"""Nodes that have come from the stage before and wait for their pass."""

import torch
from torch import Tensor

from ppd_runtime.pipeline.messages import Rows
from ppd_runtime.pipeline.staged.tree import Node, NodeTree


class Arrivals:
    """Waiting nodes of a tree, in the order in which they came."""

    def __init__(self, tree: NodeTree) -> None:
        self._tree = tree
        self._waiting: list[Node] = []

    def take(self, rows: Rows) -> None:
        """Add what may still come true."""
        for row, number in enumerate(rows.nodes):
            node = self._tree.add(number, rows.token_ids[row], rows.positions[row], rows.parents[row])
            if node is not None:
                node.hidden, node.pass_number = rows.hidden[:, row : row + 1], rows.pass_number
                self._waiting.append(node)

    def next_pass(self) -> list[Node]:
        """The nodes to run next: those of the oldest pass, or of that with the certain token; none where none waits."""
        self._waiting = [node for node in self._waiting if not node.is_dropped]
        ready = [node for node in self._waiting if self._is_ready(node)]
        if not ready:
            return []
        first = next((node for node in ready if node.is_certain), ready[0])
        chosen: list[Node] = []
        for node in self._waiting:  # parents come before their children
            if node.pass_number == first.pass_number and (self._is_ready(node) or node.parent in chosen):
                chosen.append(node)
        self._waiting = [node for node in self._waiting if node not in chosen]
        return chosen

    @staticmethod
    def states(nodes: list[Node]) -> Tensor:
        """What the nodes enter with, `[1, nodes, hidden_size]`."""
        states = [node.hidden for node in nodes]
        return torch.cat([state for state in states if state is not None], dim=1)

    def _is_ready(self, node: Node) -> bool:
        return node.parent is None or node.parent.has_run
