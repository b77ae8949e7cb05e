"""Preallocated caches hand out what transformers' own growing caches hand out, and can be cut and shipped."""

import random

import pytest
import torch
from models_for_tests import build_model
from transformers import LlamaConfig, MistralConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ppd_runtime.models.stage.caches import PreallocatedLayer, StageCache
from ppd_runtime.models.stage.library_probe import cache_windows

HEADS, DIM, CAPACITY, WINDOW = 2, 4, 40, 6
WINDOWS = (None, WINDOW, 1, 2, CAPACITY)


def entries(tokens: int, seed: int, value_dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, HEADS, tokens, DIM, generator=generator)
    return keys, torch.randn(1, HEADS, tokens, value_dim, generator=generator)


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def filled_cache(config: LlamaConfig, tokens: int, seed: int = 0) -> StageCache:
    cache = StageCache(cache_windows(config), CAPACITY)
    for i, layer in enumerate(cache.layers):
        layer.write(*entries(tokens, seed * 100 + i))
    return cache


@pytest.mark.parametrize("window", [None, 2, WINDOW, CAPACITY])
@pytest.mark.parametrize("sizes", [[5] + [1] * 20, [1] * 20, [20, 1, 1, 1], [3, 4, 5, 1, 6, 7], [6, 6, 6], [7, 1]])
def test_a_layer_hands_out_what_transformers_layer_does(window: int | None, sizes: list[int]) -> None:
    ours = PreallocatedLayer(CAPACITY, window)
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
    for seed, size in enumerate(sizes):
        assert ours.get_mask_sizes(size) == theirs.get_mask_sizes(size)
        assert same(ours.update(*entries(size, seed)), theirs.update(*entries(size, seed)))
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("window", WINDOWS)
def test_dropped_entries_leave_no_trace(window: int | None) -> None:
    """A random walk of appends and cuts hands out what appending the surviving tokens alone does."""
    rng = random.Random(0)
    config = LlamaConfig(num_hidden_layers=1)
    cache = StageCache(cache_windows(config), CAPACITY)
    cache.layers = [PreallocatedLayer(CAPACITY, window)]
    survivors: list[int] = []
    for seed in range(200):
        if survivors and (len(survivors) == CAPACITY or rng.random() < 0.3):
            del survivors[rng.randrange(len(survivors)) :]
            cache.truncate(len(survivors))
            continue
        handed_out = cache.layers[0].update(*entries(1, seed))
        survivors.append(seed)
        visible = survivors if window is None else survivors[-window:]
        expected = (torch.cat(side, dim=2) for side in zip(*(entries(1, s) for s in visible), strict=True))
        assert same(handed_out, tuple(expected))


def test_truncating_to_more_than_there_is_changes_nothing() -> None:
    cache = filled_cache(LlamaConfig(num_hidden_layers=2), 5)
    cache.truncate(9)
    assert [layer.length for layer in cache.layers] == [5, 5]


def test_a_full_layer_refuses_more_and_keeps_what_it_has() -> None:
    layer = PreallocatedLayer(3, None)
    layer.update(*entries(2, 0))
    before = layer.keys.clone()
    with pytest.raises(IndexError, match="a cache for 3 tokens cannot hold 4"):
        layer.update(*entries(2, 1))
    assert layer.length == 2
    assert torch.equal(layer.keys[:, :, :2], before[:, :, :2])
    layer.update(*entries(1, 1))
    assert layer.length == layer.get_max_length() == 3


def test_memory_is_taken_once() -> None:
    layer = PreallocatedLayer(CAPACITY, WINDOW)
    layer.update(*entries(2, 0))
    address = layer.keys.data_ptr()
    for seed in range(30):
        layer.update(*entries(1, seed))
    assert layer.keys.data_ptr() == address
    assert layer.keys.shape == (1, HEADS, CAPACITY, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_keeps_the_dtype_and_the_size_of_values(dtype: torch.dtype) -> None:
    layer = PreallocatedLayer(CAPACITY, None)
    keys, values = (t.to(dtype) for t in entries(3, 0, value_dim=DIM + 2))
    assert same(layer.update(keys, values), (keys, values))
    assert layer.keys.dtype == layer.values.dtype == dtype


@pytest.mark.parametrize("positions", [[5], [5, 6, 7], list(range(5, 20))])
def test_entries_arrive_where_they_came_from(positions: list[int]) -> None:
    config = MistralConfig(num_hidden_layers=4, sliding_window=WINDOW)
    source, target = filled_cache(config, 20), filled_cache(config, 5)
    target.import_entries([source.export_entries(position, position + 1, 3)[0] for position in positions])
    assert [layer.length for layer in target.layers] == [5 + len(positions)] * 3 + [5]
    for ours, theirs in zip(target.layers[:3], source.layers, strict=False):
        end = 5 + len(positions)
        assert torch.equal(ours.keys[:, :, 5:end], theirs.keys[:, :, 5:end])
        assert torch.equal(ours.values[:, :, 5:end], theirs.values[:, :, 5:end])


def test_an_exported_entry_is_a_copy_with_the_promised_shape() -> None:
    cache = filled_cache(LlamaConfig(num_hidden_layers=3), 5)
    entry = cache.export_entries(4, 4 + 1, 2)[0]
    assert entry.shape == (2, 2, HEADS, DIM)
    kept = entry.clone()
    cache.truncate(0)
    for layer in cache.layers:
        layer.write(*entries(5, 77))
    assert torch.equal(entry, kept)
    assert not torch.equal(cache.export_entries(4, 4 + 1, 2)[0], kept)


def test_entries_can_be_imported_into_an_empty_cache() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    source, target = filled_cache(config, 3), StageCache(cache_windows(config), CAPACITY)
    target.import_entries([source.export_entries(i, i + 1, 2)[0] for i in range(3)])
    assert torch.equal(target.export_entries(2, 2 + 1, 2)[0], source.export_entries(2, 2 + 1, 2)[0])


def test_a_view_is_the_same_layers_under_the_models_numbers() -> None:
    cache = StageCache([None] * 5, CAPACITY)
    view = cache.view((2, 3))
    view.update(*entries(3, 0), layer_idx=2)
    view.update(*entries(3, 1), layer_idx=3)
    assert [layer.length for layer in cache.layers] == [0, 0, 3, 3, 0]
    assert view.get_seq_length() == 3
    cache.truncate(1)
    assert view.get_seq_length() == 1


def test_windows_are_read_from_the_layer_kinds() -> None:
    gemma = build_model("gemma2", num_layers=3).config
    assert cache_windows(gemma) == [6, None, 6]
    assert cache_windows(MistralConfig(num_hidden_layers=2, sliding_window=9)) == [9, 9]
    assert cache_windows(MistralConfig(num_hidden_layers=2, sliding_window=None)) == [None, None]
    assert cache_windows(LlamaConfig(num_hidden_layers=2)) == [None, None]
    qwen = build_model("qwen2", num_layers=3, use_sliding_window=True, sliding_window=9, max_window_layers=2).config
    assert cache_windows(qwen) == [None, None, 9]
