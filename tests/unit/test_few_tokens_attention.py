"""Attention of a few tokens: the numbers that the plain formula gives, in bits that depend on nothing beside."""

import random

import pytest
import torch
from compilers import needs_compiler
from grids import pairs_first
from torch import Tensor

from ppd_runtime.models.native.attention import few_tokens_attention

pytestmark = needs_compiler
LOWEST = torch.finfo(torch.float32).min
SHAPES = [
    (1, 1, 16, 16),
    (4, 2, 64, 64),
    (6, 1, 32, 32),
    (8, 8, 24, 40),
    (3, 3, 7, 5),
    (10, 2, 128, 128),
    (2, 1, 65, 66),
]
"""Heads, heads of keys, and sizes of their keys and values."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(shape: tuple[int, int, int, int], tokens: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as a cache holds them: a token's heads together."""
    heads, key_heads, dim, value_dim = shape
    keys, values = numbers(rows, key_heads, dim), numbers(rows, key_heads, value_dim)
    return 3 * numbers(1, heads, tokens, dim), keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def causal(tokens: int, position: int, rows: int, window: int | None = None) -> Tensor:
    row, token = torch.arange(rows), position + torch.arange(tokens)[:, None]
    seen = (row <= token) if window is None else (row <= token) & (row > token - window)
    return torch.where(seen, 0.0, LOWEST)[None, None]


def in_place(tokens: int, position: int) -> tuple[Tensor, Tensor]:
    """Places and tails of tokens one behind the other, whose texts lie in the rows of their positions."""
    places = position + torch.arange(tokens)
    return places[None], places[:, None]


def by_the_formula(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: Tensor, tails: Tensor, scale: float
) -> Tensor:
    q, k, v = (tensor.double() for tensor in (queries, keys, values))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    return ((q @ k.transpose(-1, -2) * scale + mask.double()).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("shape", "rows", "window"), pairs_first(SHAPES, [1, 13, 64, 192, 700], [None, 9, 50]))
def test_as_the_formula(shape: tuple[int, int, int, int], rows: int, window: int | None) -> None:
    for tokens in {1, min(rows, 2), min(rows, 5)}:
        position = max(rows - tokens - 7, 0)
        given = (*inputs(shape, tokens, rows), causal(tokens, position, rows, window), *in_place(tokens, position), 0.2)
        found = few_tokens_attention(*given)
        assert found.shape == (1, tokens, shape[0], shape[3])
        assert torch.allclose(found.double(), by_the_formula(*given), atol=1e-5)
        assert torch.equal(few_tokens_attention.in_graphs()(*given), found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 6, 50])
def test_bits_do_not_depend_on_where_a_text_lies(shape: tuple[int, int, int, int], window: int | None) -> None:
    """Random paths in random rows; each alone, with its text in the rows of its positions, has the same bits."""
    rng = random.Random(str((shape, window)))
    for tokens in (1, 2, 3, 7, 8):
        queries, keys, values = inputs(shape, tokens, 192)
        shared = rng.randrange(1, 90)
        paths = [rng.sample(range(shared, 192), rng.randrange(1, 12)) for _ in range(tokens)]
        mask = torch.full((1, 1, tokens, 192), LOWEST)
        depth = max(map(len, paths)) + rng.randrange(2)
        first = shared + max(map(len, paths)) - depth
        texts = [[*range(shared), *path] for path in paths]
        for token, text in enumerate(texts):
            mask[0, 0, token, text[-window:] if window else text] = 0.0
        places = torch.tensor([[len(text) - 1 for text in texts]])
        tails = torch.tensor([(text[first:] + [191] * depth)[:depth] for text in texts])
        together = few_tokens_attention(queries, keys, values, mask, places, tails, 0.125)
        for token, text in enumerate(texts):
            position, rows = len(text) - 1, -(-len(text) // 64) * 64
            moved = [*text, *range(rows)][:rows]
            alone = few_tokens_attention(
                queries[:, :, token : token + 1],
                keys[:, :, moved],
                values[:, :, moved],
                causal(1, position, rows, window),
                *in_place(1, position),
                0.125,
            )
            assert torch.equal(together[:, token : token + 1], alone)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 9, 100])
def test_a_tokens_bits_depend_on_nothing_beside_it(shape: tuple[int, int, int, int], window: int | None) -> None:
    queries, keys, values = inputs(shape, 7, 384)
    for position in (0, 5, 130, 300):
        for tokens in (2, 3, 5, 7):
            mask = causal(tokens, position, 384, window)
            together = few_tokens_attention(
                queries[:, :, :tokens], keys, values, mask, *in_place(tokens, position), 0.125
            )
            for token in range(tokens):
                rows = -(-(position + token + 1) // 64) * 64  # fewer hidden ones behind it
                alone = few_tokens_attention(
                    queries[:, :, token : token + 1],
                    keys[:, :, :rows],
                    values[:, :, :rows],
                    causal(1, position + token, rows, window),
                    *in_place(1, position + token),
                    0.125,
                )
                assert torch.equal(together[:, token : token + 1], alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    given = (*inputs((8, 8, 64, 64), 3, 1024), causal(3, 1000, 1024), *in_place(3, 1000), 0.125)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = few_tokens_attention(*given)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(few_tokens_attention(*given), expected)
    finally:
        torch.set_num_threads(before)


def test_extreme_scores() -> None:
    queries, keys, values = inputs(SHAPES[1], 1, 64)
    mask = causal(1, 40, 64)
    for factor in (0.0, 1e-30, 1e3, 1e18):
        given = (queries * factor, keys, values, mask, *in_place(1, 40), 0.125)
        assert torch.allclose(few_tokens_attention(*given).double(), by_the_formula(*given), atol=1e-4)
    hidden = torch.where(mask < 0, -torch.inf, 0.0)
    given = (queries, keys, values, hidden, *in_place(1, 40), 0.125)
    assert torch.equal(
        few_tokens_attention(*given), few_tokens_attention(queries, keys, values, mask, *in_place(1, 40), 0.125)
    )


def test_other_shapes_and_dtypes_are_refused() -> None:
    queries, keys, values = inputs(SHAPES[1], 2, 64)
    mask, (places, tails) = causal(2, 40, 64), in_place(2, 40)
    for given in (
        (queries.bfloat16(), keys, values, mask, places, tails),
        (queries[:, :3], keys, values, mask, places, tails),
        (queries, keys[:, :, :63], values, mask, places, tails),
        (queries, keys, values, mask[:, :, :1], places, tails),
        (queries, keys, values[..., ::2], mask, places, tails),
        (queries[0], keys, values, mask, places, tails),
        (queries, keys, values, mask, places[:, :1], tails),
        (queries, keys, values, mask, places + 24, tails),
        (queries, keys, values, mask, places, tails + 24),
        (queries, keys, values, mask, places, -tails),
        (queries, keys, values, mask, places.int(), tails),
        (queries, keys, values, mask, places, tails.expand(2, 43).contiguous()),
    ):
        with pytest.raises(ValueError, match="few_tokens_attention: not made for queries"):
            few_tokens_attention(*given, 0.125)
