"""Attention and rotary embeddings of several tokens are the library's, to the bit, without its copies and sines."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grids import pairs_first
from models_for_tests import load_stage
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ppd_runtime.models.stage import grouped_attention
from ppd_runtime.models.stage.grouped_attention import SHARED_HEADS, bitwise_grouped_attention
from ppd_runtime.models.stage.rotary import _FEW_TOKENS, _POSITIONS_AT_ONCE, RotaryTable

ModelFolder = Callable[..., Path]


def states(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "heads", "tokens", "rows", "kind"),
    pairs_first(
        [torch.float32, torch.bfloat16],
        [(4, 4), (4, 2), (6, 2), (8, 1)],
        [1, 2, 4, 13, 130],
        [7, 304, 1100],
        ["bool", "additive", "none"],
    ),
)
def test_it_is_the_librarys_attention_to_the_bit(
    dtype: torch.dtype, heads: tuple[int, int], tokens: int, rows: int, kind: str
) -> None:
    (heads, groups), rows = heads, rows + tokens
    query = states(1, tokens, heads, 32, dtype=dtype, seed=1).transpose(1, 2)
    key, value = (states(rows, groups, 32, dtype=dtype, seed=seed).transpose(0, 1)[None] for seed in (2, 3))
    seen = torch.ones(1, 1, tokens, rows, dtype=torch.bool).tril(rows - tokens)
    added = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
    mask = {"bool": seen, "additive": added, "none": None}[kind]
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    with torch.inference_mode():
        ours, theirs = (
            attend(module, query, key, value, mask, dropout=0.0, scaling=0.2)[0]
            for attend in (bitwise_grouped_attention, sdpa_attention_forward)
        )
    assert ours.shape == (1, tokens, heads, 32)
    assert torch.equal(ours, theirs)


class _Watched:
    """Counts copies of keys and values, calls that leave the grouping to PyTorch, and masks that it would convert."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = self.grouped = self.converted = 0

        def repeat_kv(hidden: Tensor, times: int) -> Tensor:
            self.copies += times > 1
            return original(hidden, times)

        def attend(*args: object, attn_mask: Tensor | None, **kwargs: object) -> Tensor:
            self.grouped += bool(kwargs.get("enable_gqa"))
            self.converted += attn_mask is not None and attn_mask.dtype == torch.bool
            return scaled_dot_product_attention(*args, attn_mask=attn_mask, **kwargs)

        original = sdpa_attention.repeat_kv
        monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat_kv)
        monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_stage_copies_no_keys_and_converts_no_masks_for_several_tokens(
    model_folder: ModelFolder, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load_stage(model_folder(family))
    watched = _Watched(monkeypatch)
    stage.begin(40)
    stage.run(0, 4, list(range(20, 30)), 0)
    for inputs in ([5, 6, 7], [8, 9]):
        stage.run(0, 4, inputs, stage.length(0))
    stage.run_tree([3, 4, 5], [-1, 0, 0], stage.length(0))
    assert watched.copies == watched.converted == 0
    assert watched.grouped >= 3 * 4


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_are_transformers_own_to_the_bit(model_folder: ModelFolder, family: str, dtype: str) -> None:
    folder = model_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    stage, cache = load_stage(folder, dtype=dtype), None
    stage.begin(40)
    for inputs in (list(range(20, 30)), [5, 6, 7], [8], [9, 10, 11, 12, 13], [3, 4]):
        ours = stage.token_logits(stage.run(0, 4, inputs, stage.length(0)))
        with torch.inference_mode():
            output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        assert torch.equal(ours, output.logits[0].float())


def test_only_a_stages_own_model_uses_it(model_folder: ModelFolder) -> None:
    stage = load_stage(model_folder("llama"))
    assert stage.model.config._attn_implementation == SHARED_HEADS
    other = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    assert other.config._attn_implementation == "sdpa"


def test_where_products_over_shared_heads_have_other_bits_it_is_not_used(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch may take another way for them."""

    def attend(*args: Tensor, enable_gqa: bool = False, **kwargs: object) -> Tensor:
        return scaled_dot_product_attention(*args, enable_gqa=enable_gqa, **kwargs) * (1 + 1e-6 * enable_gqa)

    monkeypatch.setattr(grouped_attention, "scaled_dot_product_attention", attend)
    grouped_attention.keeps_the_bits.cache_clear()
    try:
        assert load_stage(model_folder("llama")).model.config._attn_implementation == "sdpa"
    finally:
        grouped_attention.keeps_the_bits.cache_clear()


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ('if self.config._attn_implementation == "sdpa":', True),
        ('if config._attn_implementation in ("eager", "sdpa"):', True),
        ('if config._attn_implementation not in ("eager",):', True),
        ("get_interface(self.config._attn_implementation, eager)", False),
    ],
)
def test_a_model_whose_code_asks_for_the_name_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, asks: bool
) -> None:
    (tmp_path / "modeling_curious.py").write_text(f"# {line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "modeling_curious", raising=False)
    importlib.import_module("modeling_curious")
    grouped_attention.asks_for_its_name.cache_clear()
    assert grouped_attention.asks_for_its_name("modeling_curious") is asks


class _Odd(nn.Module):
    """Rotary embeddings as some models have them: places in three dimensions, or one tensor of complex numbers."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        self.is_complex = is_complex

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * torch.ones(4)
        return torch.polar(torch.ones_like(angles), angles) if self.is_complex else (angles.cos(), angles.sin())


@pytest.mark.parametrize(
    ("is_complex", "positions"),
    [
        (False, [[[5]], [[5]], [[6]]]),
        (False, [[[5, 6, 7]]] * 3),
        (False, [[1, 2], [3, 4]]),
        (True, [[5]]),
        (True, [[5, 6, 7]]),
    ],
    ids=str,
)
def test_odd_rotary_embeddings_are_asked_themselves(is_complex: bool, positions: list[Any]) -> None:
    odd, places, hidden = _Odd(is_complex), torch.tensor(positions), torch.zeros(1, 1, 4)
    table = RotaryTable(odd)
    for _ in range(2):
        ours, theirs = table(hidden, places), odd(hidden, places)
        if is_complex:
            assert torch.equal(ours, theirs)
        else:
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class _Counting(nn.Module):
    """A decoder's rotary embedding that counts how often it is asked."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary, self.asked = rotary, 0

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.rotary(hidden, position_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("positions", "from_table"),
    [
        ([0], True),
        ([5, 6, 7], True),
        ([9, 9, 9], True),
        ([7, 8, 8, 9, 12], True),
        ([300, 298, 299], True),
        (list(range(40, 40 + _FEW_TOKENS)), True),
        (list(range(40, 41 + _FEW_TOKENS)), False),
        ([_POSITIONS_AT_ONCE - 1, _POSITIONS_AT_ONCE], False),
    ],
    ids=str,
)
def test_rotary_embeddings_of_few_tokens_come_from_the_table(
    model_folder: ModelFolder, dtype: torch.dtype, positions: Sequence[int], from_table: bool
) -> None:
    rotary = load_stage(model_folder("llama")).model.model.rotary_emb
    hidden, places = torch.zeros(1, len(positions), 8, dtype=dtype), torch.tensor([positions])
    counting = _Counting(rotary)
    table = RotaryTable(counting)
    table(hidden, torch.tensor([[positions[0]]]))
    asked = counting.asked
    for ours, theirs in zip(table(hidden, places), rotary(hidden, places), strict=True):
        assert torch.equal(ours, theirs)
    assert counting.asked == asked + (not from_table)
