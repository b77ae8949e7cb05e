"""Rows of nodes: none lies in another's, all lie where they are said to, whatever comes and goes."""

import random

import pytest
import torch

from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.row_order import RowOrder
from ppd_runtime.models.stage.slots import NodeSlots

CAPACITY, MOST_NODES = 30, 12


class Slots:
    """A cache whose entries are the numbers of the nodes, and the slots in it."""

    def __init__(self, moves: bool = True) -> None:
        self.cache = StageCache([None, 4], CAPACITY + MOST_NODES, moves=moves)
        for layer in self.cache.layers:
            layer.write(*(-torch.ones(1, 2, 1, 3) for _ in range(2)))
        self.slots = NodeSlots(self.cache, MOST_NODES)
        self.certain: list[int] = []

    def row(self, position: int) -> int:
        """In which it lies."""
        rows = self.cache.memory.order.rows(position, position + 1)
        return position if isinstance(rows, slice) else int(rows)

    def entries(self, positions: list[int]) -> list[int]:
        """Which node's entries lie there; all layers agree."""
        rows = list(map(self.row, positions))
        found = [half[rows].flatten(1) for layer in self.cache.layers for half in layer.rows]
        numbers = torch.cat(found, dim=1).unique(dim=1)
        assert numbers.shape[1] == 1
        return numbers[:, 0].int().tolist()

    def write(self, position: int, node: int) -> None:
        """As a pass does."""
        row = self.row(position)
        for layer in self.cache.layers:
            for half in layer.rows:
                half[row] = node

    def run(self, paths: list[list[int]], together: bool) -> None:
        """Run the last node of each path; all others lie where they should."""
        if together:
            for path, rows in zip(paths, self.slots.rows(paths), strict=True):
                assert self.cache.layers[0].length == self.slots.kept
                self.write(self.slots.kept + rows[-1], path[-1])
                assert self.entries([self.slots.kept + row for row in rows]) == path
        else:
            for path in paths:
                position = self.slots.place(path)
                assert self.cache.layers[1].length == position == self.slots.kept + len(path) - 1
                self.write(position, path[-1])
                assert self.entries(list(range(position + 1)))[self.slots.kept :] == path
        assert not self.certain or self.entries(list(range(self.slots.kept))) == self.certain


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("moves", [True, False])
def test_what_lies_where(seed: int, moves: bool) -> None:
    rng, slots, number = random.Random(seed), Slots(moves), 0
    paths: dict[int, list[int]] = {}
    while slots.slots.kept < CAPACITY - MOST_NODES:
        new = []
        for _ in range(rng.randrange(1, 5)):
            if len(paths) < MOST_NODES:
                number += 1
                paths[number] = [*paths.get(rng.choice([-1, *paths]), []), number]
                new.append(paths[number])
        if new:
            slots.run(new, together=rng.random() < 0.6)
        if rng.random() < 0.5:
            kept = rng.choice([path[0] for path in paths.values()])
            if late := rng.random() < 0.5:
                slots.slots.keep(kept)
            for node in [node for node, path in paths.items() if path[0] != kept]:
                slots.slots.drop(node)
                del paths[node]
            if not late:
                slots.slots.keep(kept)
            slots.certain.append(kept)
            paths = {node: path[1:] for node, path in paths.items() if path[1:]}
    assert isinstance(slots.cache.memory.order.rows(0, CAPACITY), slice) == moves


def test_where_rows_change_places_no_entry_moves() -> None:
    slots = Slots(moves=False)
    slots.run([[1], [2], [2, 3]], together=True)
    before = [half.clone() for layer in slots.cache.layers for half in layer.rows]
    slots.slots.keep(2)
    slots.certain.append(2)
    slots.slots.drop(1)
    slots.slots.keep(3)
    slots.certain.append(3)
    assert slots.entries([0, 1]) == [2, 3]
    assert all(map(torch.equal, before, [half for layer in slots.cache.layers for half in layer.rows]))


def test_a_text_of_any_length_goes_on_after_rows_have_changed_places() -> None:
    order = RowOrder()
    order.exchange(3, 5)
    rows = order.rows(0, 5000)
    assert not isinstance(rows, slice)
    assert rows.tolist() == [0, 1, 2, 5, 4, 3, *range(6, 5000)]


def test_more_nodes_than_there_is_room_for() -> None:
    slots = Slots()
    slots.run([[node] for node in range(1, MOST_NODES + 1)], together=True)
    slots.run([[MOST_NODES]], together=False)
    with pytest.raises(IndexError, match="no row is left for a node"):
        slots.slots.rows([[MOST_NODES + 1], [MOST_NODES + 2]])
