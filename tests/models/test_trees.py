"""A tree run in one pass is what its paths are, each run alone; what is kept of it is what is seen later."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import FAMILIES, SLIDING_WINDOW, load_stage
from torch import Tensor

from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.trees import TokenTree, chain_of, tree_of

PARENTS = (-1, 0, 0, 1, 2, 1, 3, 6, 7, 8, 9, 10, 4)
"""Deeper than the windows are long, and wide."""
TOKENS = tuple(range(100, 100 + len(PARENTS)))
ModelFolder = Callable[..., Path]


def begun(stage: LayerRange, length: int, room: int = len(TOKENS)) -> LayerRange:
    """With a prompt of `length` tokens behind it, and room for a tree and a token more."""
    stage.begin(length + room + 1)
    stage.run(0, stage.num_layers, list(range(40, 40 + length)), 0)
    return stage


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    return [*path_to(parents[node], parents), node] if node >= 0 else []


def one_by_one(stage: LayerRange, tokens: Sequence[int], position: int) -> Tensor:
    """As ordinary decoding runs them."""
    return torch.cat([stage.run(0, stage.num_layers, [t], position + i) for i, t in enumerate(tokens)], dim=1)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("length", [SLIDING_WINDOW - 2, 3 * SLIDING_WINDOW])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_is_what_it_is_alone(model_folder: ModelFolder, family: str, length: int) -> None:
    stage = begun(load_stage(model_folder(family)), length)
    got = stage.run_tree(TOKENS, PARENTS, length)
    assert got.shape == (1, len(TOKENS), 32)
    for leaf in set(range(len(PARENTS))) - set(PARENTS):
        path = path_to(leaf, PARENTS)
        stage.truncate(length)
        assert close(got[:, path], one_by_one(stage, [TOKENS[node] for node in path], length))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_that_is_kept_is_what_is_seen_later(model_folder: ModelFolder, family: str) -> None:
    length, path = 2 * SLIDING_WINDOW, path_to(11, PARENTS)
    end = length + len(path)
    alone, tree = (begun(load_stage(model_folder(family)), length) for _ in range(2))
    one_by_one(alone, [TOKENS[node] for node in path], length)
    tree.run_tree(TOKENS, PARENTS, length)
    tree.keep_path(length, path)
    assert [tree.length(layer) for layer in range(4)] == [end] * 4
    assert close(tree.export_entries(0, end, 4), alone.export_entries(0, end, 4))
    assert close(tree.run(0, 4, [77], end), alone.run(0, 4, [77], end))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chain_is_an_ordinary_pass_to_the_last_bit(model_folder: ModelFolder, dtype: str) -> None:
    ordinary, chain = (begun(load_stage(model_folder("mistral"), dtype), 9) for _ in range(2))
    expected = ordinary.run(0, 4, list(TOKENS), 9)
    assert torch.equal(chain.run_tree(TOKENS, list(range(-1, len(TOKENS) - 1)), 9), expected)
    chain.keep_path(9, [0, 1, 2])
    ordinary.truncate(12)
    assert torch.equal(chain.run(0, 4, [7], 12), ordinary.run(0, 4, [7], 12))


@pytest.mark.parametrize("window", [None, 16])
def test_a_chains_masks_hold_memory_for_the_longest_text_alone(window: int | None) -> None:
    """And not for each length that a text has had."""
    tree, longest = TokenTree(((0,), (0, 1), (0, 1, 2)), torch.device("cpu")), 4096
    for rows in range(64, longest + 1, 64):
        start = torch.tensor([rows - 7])
        hidden = tree.mask(start, rows, window, torch.float32)[0, 0] < 0
        assert torch.equal(hidden, tree._hides(start, rows, window))
    assert sum(part.nbytes for part in tree._ahead.values()) < 3 * tree.size * longest * 8


def test_a_tree_needs_its_place_and_room(model_folder: ModelFolder) -> None:
    stage = begun(load_stage(model_folder("llama")), 5, room=3)
    with pytest.raises(RuntimeError, match="layer 0 holds 5 tokens, the pass starts at position 4"):
        stage.run_tree([1, 2, 3], [-1, 0, 0], 4)
    with pytest.raises(IndexError, match="9 tokens cannot hold 10"):
        stage.run_tree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 1], 5)
    passes = stage.layer_passes
    stage.run_tree([1, 2, 3, 4], [-1, 0, 0, 1], 5)
    assert stage.layer_passes == passes + 4 * 4


@pytest.mark.parametrize(("place", "shared"), [("cpu", True), ("cuda", False)])
def test_threads_share_trees_but_on_gpus(place: str, shared: bool) -> None:
    """A thread's streams are its own: another one would read a tree that a GPU is still making."""
    device = torch.device(place)
    here = [chain_of(4, device), tree_of(((0,), (1,)), device)]
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(lambda: [chain_of(4, device), tree_of(((0,), (1,)), device)]).result()
    assert all((a is b) == shared for a, b in zip(here, there, strict=True))
    assert here == [chain_of(4, device), tree_of(((0,), (1,)), device)]


@pytest.fixture(scope="module")
def stages(model_folder: ModelFolder) -> dict[str, LayerRange]:
    return {family: load_stage(model_folder(family)) for family in ("mistral", "gemma2")}


@given(
    family=st.sampled_from(["mistral", "gemma2"]),
    choices=st.lists(st.integers(-1, 30), min_size=1, max_size=14),
    length=st.integers(1, 15),
    leaf=st.integers(0, 13),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_tree(stages: dict[str, LayerRange], family: str, choices: list[int], length: int, leaf: int) -> None:
    """Several roots, chains, bushes: one of its nodes, seen and kept."""
    parents = [min(choice, i - 1) for i, choice in enumerate(choices)]
    tokens = [7 * i + 3 for i in range(len(parents))]
    path = path_to(leaf % len(parents), parents)
    stage = begun(stages[family], length, room=len(tokens))
    expected = one_by_one(stage, [tokens[node] for node in path], length)
    following = stage.run(0, 4, [250], length + len(path))
    stage.truncate(length)
    got = stage.run_tree(tokens, parents, length)
    assert close(got[:, path], expected)
    stage.keep_path(length, path)
    assert close(stage.run(0, 4, [250], length + len(path)), following)
