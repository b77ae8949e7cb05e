"""Places of tokens in flight in the list of their sequence's rows: after the certain text, whatever their positions.

A pass over several tokens is told the rows of each one's path, so siblings and other branches run together. The path of
a token that runs alone is put at its positions, as in ordinary decoding, so any code may run it. Moving a node changes
the list, or moves its entries if the code reads no list (`StageCache.move`).
"""

from collections.abc import Sequence

from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.states import StateCache


class NodeSlots:
    """Places in the list of one sequence's rows, called rows here; nodes are known by numbers.

    Args:
        cache: it has room for the whole text and for `most_nodes` tokens more.
        most_nodes: nodes that have rows at any time.
    """

    def __init__(self, cache: StageCache, most_nodes: int) -> None:
        self._cache, self._most_nodes = cache, most_nodes
        self.kept = 0
        """Tokens in their final places; the next one is at this position."""
        self._rows: dict[int, int] = {}  # by node
        self._nodes: dict[int, int] = {}  # by row

    def place(self, path: Sequence[int]) -> int:
        """Put a path of nodes in place after the kept tokens, so that the last can run alone.

        Returns its position, which is how many tokens the layers hold. IndexError without room.
        """
        for row, node in enumerate(path, self.kept):
            self._put(node, row)
        position = self.kept + len(path) - 1
        self._cache.set_length(position)
        return position

    def rows(self, paths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The rows of nodes that run together, each the last of its path, and of its ancestors.

        They count from the kept tokens on, which the layers then hold. IndexError without room.
        """
        for path in paths:
            for row, node in enumerate(path, self.kept):
                if node not in self._rows:
                    self._take(node, row if row not in self._nodes else self._free_row())
        self._cache.set_length(self.kept)
        return tuple(tuple(self._rows[node] - self.kept for node in path) for path in paths)

    @property
    def reach(self) -> int:
        """Rows up to the last one that may have been used."""
        return self.kept + self._most_nodes + 1

    def keep_run(self, tokens: int) -> None:
        """Keep so many tokens that have run in their places, behind the kept ones."""
        self.kept += tokens

    def keep(self, node: int) -> None:
        """Keep the node as the next certain token, in its place."""
        self._put(node, self.kept)
        self.drop(node)
        self.kept += 1

    def drop(self, node: int) -> None:
        """Free a node's row, if it has one."""
        if (row := self._rows.pop(node, None)) is not None:
            del self._nodes[row]

    def _put(self, node: int, row: int) -> None:
        if (other := self._nodes.get(row)) == node:
            return
        if other is not None:
            self._move(other, self._free_row())
        if node in self._rows:
            self._move(node, row)
        else:
            self._take(node, row)

    def _move(self, node: int, row: int) -> None:
        before = self._rows[node]
        self._cache.move(before, row)
        del self._nodes[before]
        self._take(node, row)

    def _take(self, node: int, row: int) -> None:
        self._rows[node], self._nodes[row] = row, node

    def _free_row(self) -> int:
        """The last free row: rows before it are positions of tokens that may come sooner."""
        for row in range(self.kept + self._most_nodes, self.kept - 1, -1):  # one more than there are nodes
            if row not in self._nodes:
                return row
        raise IndexError("no row is left for a node")


class StateSlots(NodeSlots):
    """Places of tokens whose layers keep states: a dropped node's are freed, and of certain tokens' the newest stay."""

    def __init__(self, cache: StateCache, most_nodes: int) -> None:
        super().__init__(cache, most_nodes)
        self._states = cache
        cache.back = None

    def keep_run(self, tokens: int) -> None:
        """Keep so many tokens that have run in their places, behind the kept ones."""
        super().keep_run(tokens)
        self._states.forget_before(self.kept - 1)

    def keep(self, node: int) -> None:
        """Keep the node as the next certain token, in its place."""
        self._put(node, self.kept)
        self._rows.pop(node)
        del self._nodes[self.kept]
        self._states.forget_before(self.kept)
        self.kept += 1

    def drop(self, node: int) -> None:
        """Free a node's row and its states, if it has any."""
        if (row := self._rows.get(node)) is not None:
            self._states.forget(row)
        super().drop(node)


def node_slots(cache: StageCache, most_nodes: int) -> NodeSlots:
    """The places of `most_nodes` nodes in a cache of any kind."""
    return StateSlots(cache, most_nodes) if isinstance(cache, StateCache) else NodeSlots(cache, most_nodes)
