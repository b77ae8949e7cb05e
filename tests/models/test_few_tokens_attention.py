"""Attention of a few tokens: the numbers that the plain formula gives, in bits that depend on nothing beside."""

import random

import pytest
import torch
from compilers import needs_compiler
from grids import pairs_first
from torch import Tensor

from ppd_runtime.models.checkpoint.dtype import cpu_threads
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


def in_place(tokens: int, position: int) -> tuple[Tensor, Tensor]:
    """Where tokens are, one behind the other in the rows of their positions, and their lists."""
    places, end = position + torch.arange(tokens), position + tokens
    common = torch.where(torch.arange(tokens) > 0, end, 0)
    return torch.stack([places, places, common]), torch.arange(end).repeat(tokens, 1)


def by_the_formula(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
    lists: Tensor,
    scale: float,
    window: float,
) -> Tensor:
    mask = torch.full((queries.shape[2], keys.shape[2]), LOWEST, dtype=torch.float64)
    for token, (place, rows) in enumerate(zip(where[1].tolist(), lists.tolist(), strict=True)):
        mask[token, rows[: place + 1][-int(window) :]] = 0
    q, k, v = (tensor.double() for tensor in (queries, keys, values))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    return ((q @ k.transpose(-1, -2) * scale + mask).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(("shape", "rows", "window"), pairs_first(SHAPES, [1, 13, 64, 192, 700], [0, 9, 50]))
def test_as_the_formula(shape: tuple[int, int, int, int], rows: int, window: int) -> None:
    for tokens in {1, min(rows, 2), min(rows, 5)}:
        position = max(rows - tokens - 7, 0)
        given = (*inputs(shape, tokens, rows), *in_place(tokens, position), 0.2, float(window))
        found = few_tokens_attention(*given)
        assert found.shape == (1, tokens, shape[0], shape[3])
        assert torch.allclose(found.double(), by_the_formula(*given), atol=1e-5)
        assert torch.equal(few_tokens_attention.in_graphs()(*given), found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 6, 50])
def test_bits_do_not_depend_on_where_a_text_lies(shape: tuple[int, int, int, int], window: int) -> None:
    """Random paths behind a text, all in random rows; each alone, in the rows of its positions, has the same bits."""
    rng = random.Random(str((shape, window)))
    for tokens in (1, 2, 3, 7, 8):
        queries, keys, values = inputs(shape, tokens, 192)
        text = rng.sample(range(192), rng.randrange(1, 90))
        free = [row for row in range(192) if row not in text]
        texts = [[*text, *rng.sample(free, rng.randrange(1, 12))] for _ in range(tokens)]
        end, said = max(map(len, texts)) + rng.randrange(3), rng.randrange(1, len(text) + 1)
        lists = torch.tensor([[*rows, *[0] * end][:end] for rows in texts])
        lists[1:, :said] = 10**6  # these need only be in the first one's
        places, common = [len(rows) - 1 for rows in texts], [0, *[said] * (tokens - 1)]
        where = torch.tensor([[rows[-1] for rows in texts], places, common])
        together = few_tokens_attention(queries, keys, values, where, lists, 0.125, float(window))
        for token, text in enumerate(texts):
            position, rows = len(text) - 1, -(-len(text) // 64) * 64
            moved = [*text, *range(rows)][:rows]
            alone = few_tokens_attention(
                queries[:, :, token : token + 1],
                keys[:, :, moved],
                values[:, :, moved],
                *in_place(1, position),
                0.125,
                float(window),
            )
            assert torch.equal(together[:, token : token + 1], alone)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 9, 100])
def test_a_tokens_bits_depend_on_nothing_beside_it(shape: tuple[int, int, int, int], window: int) -> None:
    """Of one text, or of several in one pass, one of them behind what others see."""
    queries, keys, values = inputs(shape, 7, 384)
    for position in (0, 5, 130, 300):
        for tokens in (2, 3, 5, 7):
            where, lists = in_place(tokens, position)
            apart = where.clone()
            apart[2, ::3] = 0
            for beside in (where, apart):
                given = (queries[:, :, :tokens], keys, values, beside, lists, 0.125, float(window))
                together = few_tokens_attention(*given)
                for token in range(tokens):
                    rows = -(-(position + token + 1) // 64) * 64  # fewer behind it
                    alone = few_tokens_attention(
                        queries[:, :, token : token + 1],
                        keys[:, :, :rows],
                        values[:, :, :rows],
                        *in_place(1, position + token),
                        0.125,
                        float(window),
                    )
                    assert torch.equal(together[:, token : token + 1], alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    given = (*inputs((8, 8, 64, 64), 3, 1024), *in_place(3, 1000), 0.125, 0.0)
    expected = few_tokens_attention(*given)
    with cpu_threads(threads):
        assert torch.equal(few_tokens_attention(*given), expected)


def test_extreme_scores() -> None:
    queries, keys, values = inputs(SHAPES[1], 1, 64)
    for factor in (0.0, 1e-30, 1e3, 1e18):
        given = (queries * factor, keys, values, *in_place(1, 40), 0.125, 0.0)
        assert torch.allclose(few_tokens_attention(*given).double(), by_the_formula(*given), atol=1e-4)


def test_other_shapes_and_dtypes_are_refused() -> None:
    queries, keys, values = inputs(SHAPES[1], 2, 64)
    where, lists = in_place(2, 40)
    place = torch.tensor([[0], [1], [0]])
    for given in (
        (queries.bfloat16(), keys, values, where, lists),
        (queries[:, :3], keys, values, where, lists),
        (queries, keys[:, :, :63], values, where, lists),
        (queries, keys, values[..., ::2], where, lists),
        (queries[0], keys, values, where, lists),
        (queries, keys, values, where[:, :1].contiguous(), lists),
        (queries, keys, values, where[:2], lists),
        (queries, keys, values, where + place, lists),
        (queries, keys, values, where - 50 * place, lists),
        (queries, keys, values, where.int(), lists),
        (queries, keys, values, where, lists + 24),
        (queries, keys, values, where, lists - 1),
        (queries, keys, values, where, lists[:1]),
        (queries, keys, values, where, lists.int()),
    ):
        with pytest.raises(ValueError, match="few_tokens_attention: not made for queries"):
            few_tokens_attention(*given, 0.125, 0.0)
