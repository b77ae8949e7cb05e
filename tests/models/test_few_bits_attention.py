"""Attention of models with weights of few bits: the library's numbers, in bits that depend on nothing beside."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compilers import needs_compiler
from torch import Tensor

from ppd_runtime.models.build import load_stage
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.native.few_bits_attention import FEW_BITS, few_bits_attention
from ppd_runtime.models.stage.grouped_attention import bitwise_grouped_attention

pytestmark = needs_compiler
MODULE = SimpleNamespace(num_key_value_groups=2, is_causal=True)
ROWS, TOKENS = 90, 7


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(tokens: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(1, 4, tokens, 16), numbers(1, 2, rows, 16), numbers(1, 2, rows, 16)


def masks() -> dict[str, Tensor]:
    """Of a chain, one with a window, and of a tree, whose tokens see their paths."""
    row, token = torch.arange(ROWS), ROWS - TOKENS + torch.arange(TOKENS)[:, None]
    chain = row <= token
    tree = (row < ROWS - TOKENS) | (row == token)
    tree[5, ROWS - TOKENS + 2] = tree[6, ROWS - TOKENS + 2] = True
    lowest = torch.finfo(torch.float32).min
    found = {"chain": chain, "window": chain & (row > token - 30), "tree": tree}
    return {name: mask[None, None] for name, mask in found.items()} | {
        "added": torch.where(tree, 0.0, lowest)[None, None]
    }


@pytest.mark.parametrize("name", masks())
def test_several_tokens(name: str) -> None:
    """As the library's, and each to the last bit as alone, where it is given what it sees of keys and values."""
    mask, (query, key, value) = masks()[name], attended(TOKENS, ROWS)
    found, _ = few_bits_attention(MODULE, query, key, value, mask)
    library, _ = bitwise_grouped_attention(MODULE, query, key, value, mask)
    assert torch.allclose(found, library, atol=1e-5)
    for token in range(TOKENS):
        seen = mask[0, 0, token] if mask.dtype == torch.bool else mask[0, 0, token] == 0
        alone, _ = few_bits_attention(MODULE, query[:, :, token : token + 1], key[:, :, seen], value[:, :, seen], None)
        assert torch.equal(found[:, token : token + 1], alone)


def test_without_a_mask() -> None:
    for tokens in (1, TOKENS):
        given = attended(tokens, tokens)
        assert torch.allclose(
            few_bits_attention(MODULE, *given, None)[0], bitwise_grouped_attention(MODULE, *given, None)[0], atol=1e-5
        )


def test_what_is_the_librarys() -> None:
    """Long prompts, and passes through which something is learned."""
    given = attended(200, 200)
    assert torch.equal(few_bits_attention(MODULE, *given, None)[0], bitwise_grouped_attention(MODULE, *given, None)[0])
    query, key, value = attended(3, 3)
    few_bits_attention(MODULE, query.requires_grad_(), key, value, None)[0].sum().backward()
    assert query.grad is not None


def test_a_row_of_a_pass_has_the_bits_that_it_has_alone(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Through all of a model that is not compiled."""
    quantise_model(str(model_folder("mistral")), tmp_path / "few", "int4")
    stage = load_stage(describe(str(tmp_path / "few")), 4, torch.float32, "cpu", {})
    assert stage.model.config._attn_implementation == FEW_BITS
    prompt, tokens, parents = list(range(40, 60)), [9, 8, 7, 6, 5], [-1, 0, 0, 1, -1]
    stage.begin(40)
    stage.run(0, 4, prompt, 0)
    together = stage.run_tree(tokens, parents, len(prompt))
    for node in range(len(tokens)):
        path = [node]
        while (parent := parents[path[0]]) >= 0:
            path.insert(0, parent)
        stage.truncate(len(prompt))
        alone = [stage.run(0, 4, [tokens[each]], len(prompt) + i) for i, each in enumerate(path)]
        assert torch.equal(together[:, node : node + 1], alone[-1])
