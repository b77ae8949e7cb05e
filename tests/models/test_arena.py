"""Rows that several requests share: as many as there is room for, and no memory before they are used."""

import resource

import pytest
import torch

from ppd_runtime.models.stage import arena
from ppd_runtime.models.stage.arena import ArenaCache, RowArena

HEADS, DIM = 4, 8
WINDOWS = [None, None]


def written(cache: ArenaCache, tokens: int) -> ArenaCache:
    """The cache with so many tokens' entries."""
    for layer in cache.layers:
        layer.write(*(torch.ones(1, HEADS, tokens, DIM) for _ in range(2)))
    return cache


def test_a_small_first_request_leaves_room_for_all_others():
    rows = RowArena(WINDOWS, 0, room=10_000)
    first, second = written(rows.take(100), 100), written(rows.take(9_000), 9_000)
    assert first.rows.stop <= second.rows.start
    assert rows.take(6_000) is None, "more than there is room for"


def test_more_rows_than_the_machine_has_memory_are_no_error():
    """A chat without a limit asks for all of a model's positions, and gets few tokens."""
    rows, before = RowArena(WINDOWS, 0, room=2**31), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = written(rows.take(2**30), 3)
    assert cache.is_there
    assert cache.layers[1].rows[1][:4].sum() == 3 * HEADS * DIM, "the others are zeros"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "kilobytes"


def test_memory_that_the_system_refuses_is_each_requests_own(monkeypatch, caplog):
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    rows = RowArena(WINDOWS, 0)
    with monkeypatch.context() as patched:
        patched.setattr(arena.mmap, "mmap", refused)
        cache = written(rows.take(100), 5)
    assert not cache.is_there
    assert [layer.length for layer in cache.layers] == [5, 5]
    assert cache.layers[0].rows[0][:6].sum() == 5 * HEADS * DIM
    rows.give_back(cache.rows, 5)
    assert rows.take(100) is None, "later ones are not tried"
    assert "Cannot allocate memory" in caplog.text


@pytest.mark.parametrize("room", [None, 5_000])
def test_what_was_given_back_is_zero_for_the_next(room: int | None):
    rows = RowArena(WINDOWS, 0, room)
    other, cache = written(rows.take(100), 2), written(rows.take(100), 50)
    rows.give_back(cache.rows, 50)
    again = rows.take(80)
    assert again.rows.start == cache.rows.start
    assert written(again, 1).layers[0].rows[0].sum() == HEADS * DIM
    assert other.layers[0].rows[0].sum() == 2 * HEADS * DIM


def test_a_lone_sequence_leaves_its_memory_to_the_next(monkeypatch):
    rows = RowArena(WINDOWS, 0)
    cache = written(rows.take(100), 50)
    memory = cache.layers[0].rows[0].data_ptr()
    rows.give_back(cache.rows, 50)
    cache = written(rows.take(90), 1)
    assert cache.layers[0].rows[0].data_ptr() == memory
    assert cache.layers[1].rows[1].sum() == HEADS * DIM, "the others are zeros"

    rows.give_back(cache.rows, 1)
    first, second = rows.take(1_000), rows.take(1_000)
    assert second is not None, "a longer one alone leaves room for others, as the first one does"
    rows.give_back(second.rows, 0)
    written(first, 61)

    of_row = 4 * HEADS * DIM * 2 * len(WINDOWS)
    monkeypatch.setattr(arena, "_KEPT_BYTES", 60 * of_row)
    rows.give_back(first.rows, 61)
    assert not rows.cache.capacity, "too much to keep for nobody"
