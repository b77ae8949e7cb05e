"""A stage gives transformers' own bits, wherever it is cut and whichever stage computed the entries in its cache."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import nightly
from models_for_tests import FAMILIES, SLIDING_WINDOW, greedy_with_transformers, load_stage
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppd_runtime.models.stage.layer_range import LayerRange

PROMPT = [40, 7, 291, 65, 133]
NEW_TOKENS = 12
LENGTH = len(PROMPT) + NEW_TOKENS
DTYPES = ("float32", "bfloat16")
ModelFolder = Callable[..., Path]

assert LENGTH > 2 * SLIDING_WINDOW  # the windows roll


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


in_turn = pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (i + j) % 2 else nightly)
        for i, family in enumerate(FAMILIES)
        for j, dtype in enumerate(DTYPES)
    ],
)
"""By day each family in one of the dtypes: where others below gate every pair."""


def run_in_pieces(stage: LayerRange, bounds: Sequence[int], inputs: list[int], position: int) -> Tensor:
    hidden: list[int] | Tensor = inputs
    for first, last in itertools.pairwise(bounds):
        hidden = stage.run(first, last, hidden, position)
    return hidden


def forced(stage: LayerRange, tokens: Sequence[int], bounds: Sequence[int]) -> list[Tensor]:
    """Hidden states of the prompt's pass and of one pass for each of `tokens` but the last."""
    stage.begin(LENGTH)
    states = [run_in_pieces(stage, bounds, PROMPT, 0)]
    for i, token in enumerate(tokens[:-1]):
        states.append(run_in_pieces(stage, bounds, [token], len(PROMPT) + i))
    return states


def all_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_whole_stage_gives_the_logits_of_transformers(model_folder: ModelFolder, family: str, dtype: str) -> None:
    folder = model_folder(family)
    tokens, logits = greedy_with_transformers(folder, PROMPT, NEW_TOKENS, dtype)
    stage = load_stage(folder, dtype)
    states = forced(stage, tokens, [0, stage.num_layers])
    assert len(set(tokens)) > 2, "a text of one repeated token shows nothing"
    assert all_equal([stage.logits(hidden) for hidden in states], logits)


@in_turn
def test_every_cut_gives_the_same_bits(model_folder: ModelFolder, family: str, dtype: str) -> None:
    num_layers = 5
    stage = load_stage(model_folder(family, num_layers=num_layers), dtype)
    tokens = list(range(11, 11 + NEW_TOKENS))
    whole = forced(stage, tokens, [0, num_layers])
    assert all_equal(forced(stage, tokens, [0, 2, num_layers]), whole), "cut after layer 2"
    assert all_equal(forced(stage, tokens, range(num_layers + 1)), whole), "cut after every layer"


@in_turn
def test_truncating_is_as_if_the_tokens_had_never_run(model_folder: ModelFolder, family: str, dtype: str) -> None:
    stage = load_stage(model_folder(family), dtype)
    n, tokens = stage.num_layers, list(range(60, 60 + NEW_TOKENS))
    expected = forced(stage, tokens, [0, n])
    stage.begin(LENGTH)
    states = [stage.run(0, n, PROMPT, 0)]
    for i, token in enumerate(tokens[:-1]):
        position = len(PROMPT) + i
        for wrong in range(1 + i % 2):  # one or two tokens beyond the end of the text
            stage.run(0, n, [token + 100], position + wrong)
        stage.truncate(position)
        states.append(stage.run(0, n, [token], position))
    assert all_equal(states, expected)


def test_truncating_far_back_beyond_the_window(model_folder: ModelFolder, dtype: str) -> None:
    stage = load_stage(model_folder("mistral"), dtype)
    n, tokens = stage.num_layers, list(range(60, 60 + NEW_TOKENS))
    expected = forced(stage, tokens, [0, n])
    stage.truncate(len(PROMPT))
    again = [stage.run(0, n, [token], len(PROMPT) + i) for i, token in enumerate(tokens[:-1])]
    assert all_equal(again, expected[1:])


@in_turn
def test_imported_entries_give_the_same_continuation(model_folder: ModelFolder, family: str, dtype: str) -> None:
    """The head start's entries come from a sub-process that holds the first layers only."""
    folder, head_start = model_folder(family), 2
    main, sub = load_stage(folder, dtype), load_stage(folder, dtype, last=head_start)
    n, tokens = main.num_layers, list(range(30, 30 + NEW_TOKENS))
    expected = forced(main, tokens, [0, n])
    main.begin(LENGTH)
    sub.begin(LENGTH)
    states = [main.run(0, n, PROMPT, 0)]
    sub.run(0, head_start, PROMPT, 0)
    waiting: list[Tensor] = []
    for i, token in enumerate(tokens[:-1]):
        position = len(PROMPT) + i
        if i % 4 == 3:  # a miss after three hits: main fills its first layers and starts the token itself
            main.import_entries(waiting)
            waiting.clear()
            states.append(main.run(0, n, [token], position))
            sub.run(0, head_start, [token], position)
            continue
        hidden = sub.run(0, head_start, [token], position)
        assert torch.equal(sub.logits(hidden), main.logits(hidden)), "the exit head is the model's own"
        waiting.append(sub.export_entries(position, position + 1, head_start)[0])
        states.append(main.run(head_start, n, hidden, position))
    assert all_equal(states, expected)
    assert main.length(n - 1) == LENGTH - 1


@pytest.mark.parametrize("last", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied_heads(model_folder: ModelFolder, tied: bool, last: int) -> None:
    folder = model_folder("llama", tied=tied)
    model = load_stage(folder, last=last).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if last == 4:
        tokens, logits = greedy_with_transformers(folder, PROMPT, 3)
        stage = load_stage(folder)
        assert all_equal([stage.logits(h) for h in forced(stage, tokens, [0, 4])], logits)


def test_a_stage_starts_over_with_each_sequence(model_folder: ModelFolder, dtype: str) -> None:
    stage = load_stage(model_folder("gemma2"), dtype)
    tokens, bounds = list(range(NEW_TOKENS)), [0, 1, stage.num_layers]
    first = forced(stage, tokens, bounds)
    stage.begin(100)
    stage.run(0, stage.num_layers, list(range(90)), 0)
    assert all_equal(forced(stage, tokens, bounds), first)


def test_hidden_states_given_out_are_not_overwritten(model_folder: ModelFolder) -> None:
    stage = load_stage(model_folder("llama"))
    stage.begin(LENGTH)
    hidden = stage.run(0, 2, PROMPT, 0)
    entry = stage.export_entries(2, 2 + 1, 2)[0]
    kept = [t.clone() for t in (hidden, entry)]
    stage.run(2, 4, hidden, 0)
    stage.truncate(0)
    stage.run(0, 2, [1, 2, 3, 4], 0)
    assert all_equal([hidden, entry], kept)


def test_a_pass_at_the_wrong_position_is_refused(model_folder: ModelFolder) -> None:
    stage = load_stage(model_folder("llama"))
    stage.begin(LENGTH)
    hidden = stage.run(0, 2, PROMPT, 0)
    for position in (0, len(PROMPT) - 1, len(PROMPT) + 1):
        with pytest.raises(RuntimeError, match=f"layer 0 holds {len(PROMPT)} tokens.*position {position}"):
            stage.run(0, 2, [1], position)
    with pytest.raises(RuntimeError, match="layer 2 holds 0 tokens"):
        stage.run(2, 4, hidden, len(PROMPT))
    assert [stage.length(i) for i in range(4)] == [len(PROMPT)] * 2 + [0] * 2


def test_a_pass_beyond_the_capacity_is_refused_and_changes_nothing(model_folder: ModelFolder) -> None:
    stage = load_stage(model_folder("llama"))
    stage.begin(len(PROMPT) + 1)
    stage.run(0, 4, PROMPT, 0)
    with pytest.raises(IndexError, match="6 tokens cannot hold 7"):
        stage.run(0, 4, [1, 2], len(PROMPT))
    assert [stage.length(i) for i in range(4)] == [len(PROMPT)] * 4
    stage.run(0, 4, [1], len(PROMPT))


class _Operations(TorchDispatchMode):
    """Every operation with the bytes of the memory that its result lies in: a view's are those of what it views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((func.overloadpacket.__name__, result.untyped_storage().nbytes()))
        return result


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2"])
def test_a_one_token_pass_allocates_no_more_at_a_later_position(model_folder: ModelFolder, family: str) -> None:
    """And computes no masks, positions or rotary tables: those are there before.

    Where layers have windows, the library makes a mask of the window's size once a pass.
    """
    stage = load_stage(model_folder(family))
    stage.begin(64)
    stage.run(0, 4, list(range(20, 40)), 0)
    seen = {}
    for position in range(20, 60):
        with _Operations() as operations:
            stage.run(0, 4, [5], position)
        seen[position] = operations.seen
    names = {name for name, _ in seen[25]}
    assert "linear" in names
    assert not names & {"arange", "cos", "sin", "full", "tril", "triu", "where", "masked_fill", "zeros", "index"}
    assert seen[30] == seen[25]
    assert seen[59] == seen[25]
