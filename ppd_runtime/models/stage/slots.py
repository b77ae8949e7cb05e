"""Where the entries of tokens in flight lie: of a tree behind the certain text, one path at a time is in place.

A pass attends to the rows of a cache in position order, and its bits depend on where they lie. So a node's ancestors
are put into the rows of their positions before it runs, as in ordinary decoding; nodes of other branches that lie there
move to spare rows behind the capacity. Where the tree is a chain, nothing moves.
"""

from collections.abc import Sequence

from ppd_runtime.models.stage.caches import StageCache


class NodeSlots:
    """Rows of one sequence's cache; nodes are known by numbers.

    Args:
        cache: it has room for `capacity` tokens and `spare` more.
        kept: tokens that lie in place for good; the next one stands at this position.
    """

    def __init__(self, cache: StageCache, capacity: int, spare: int) -> None:
        self._cache, self.kept = cache, 0
        self._rows: dict[int, int] = {}  # by node
        self._nodes: dict[int, int] = {}  # by row, of those that are no spare ones
        self._capacity, self._spare = capacity, list(range(capacity, capacity + spare))

    def place(self, path: Sequence[int], newest: int = 1) -> int:
        """Put nodes into place that stand one behind the other behind the kept tokens, for the newest to run.

        The position of the first that runs, which is how many tokens the layers hold then. IndexError where there is no
        room.
        """
        for row, node in enumerate(path, self.kept):
            self._put(node, row)
        position = self.kept + len(path) - newest
        self._cache.set_length(position)
        return position

    def keep(self, node: int) -> None:
        """The node is the next of the certain tokens: it stays in place."""
        self._put(node, self.kept)
        del self._rows[node], self._nodes[self.kept]
        self.kept += 1

    def drop(self, node: int) -> None:
        """Give a node's row free, if it has one."""
        if (row := self._rows.pop(node, None)) is not None:
            self._free(row)

    def _put(self, node: int, row: int) -> None:
        if (held := self._rows.get(node)) == row:
            return
        if (other := self._nodes.get(row)) is not None:
            if not self._spare:
                raise IndexError("no spare row is left for a node")
            self._move(other, self._spare.pop())
        if held is None:
            self._rows[node], self._nodes[row] = row, node
        else:
            self._move(node, row)

    def _move(self, node: int, row: int) -> None:
        before = self._rows[node]
        self._cache.copy_row(before, row)
        self._free(before)
        self._rows[node] = row
        if row < self._capacity:
            self._nodes[row] = node

    def _free(self, row: int) -> None:
        if row < self._capacity:
            del self._nodes[row]
        else:
            self._spare.append(row)
