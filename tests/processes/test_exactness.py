"""All tokens equal transformers' own `generate` and ordinary decoding's, over threads and over Ray and its sockets.

By day over threads with some prompts, and a layout for each family and dtype; in the night all of them.
"""

import functools
import itertools

import pytest
import torch
from grids import nightly
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.trained.exit_heads import OracleHead

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2"]
DTYPES = ["float32", "bfloat16"]
LAYOUTS = list(itertools.product((1, 3, 5), (3, 4)))  # k and exit layer, for five layers
NEW_TOKENS = 12
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 17, 20, 24, 30, 37, 45, 60)
BY_DAY = (1, 3, 17, 60)
Texts = dict[tuple[int, ...], tuple[int, ...]]


def prompts(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """One of each length."""
    generator = torch.Generator().manual_seed(1)
    every = [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    return [prompt for prompt in every if len(prompt) in lengths]


@functools.cache
def expected_tokens(folder: str, dtype: str, lengths: tuple[int, ...]) -> Texts:
    """Transformers' greedy text for each prompt, checked against ordinary decoding here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ordinary = OrdinaryDecoding(folder, dtype=dtype)
    texts = {}
    for prompt in prompts(model.config.vocab_size, lengths):
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        texts[tuple(prompt)] = tuple(output[0, len(prompt) :].tolist())
        assert ordinary.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids == texts[tuple(prompt)]
    return texts


def check(runtime: PPDRuntime, texts: Texts) -> None:
    """Every prompt's tokens through a runtime."""
    for prompt, tokens in texts.items():
        result = runtime.generate(list(prompt), max_new_tokens=NEW_TOKENS)
        assert result.token_ids == tokens, f"prompt of {len(prompt)} tokens"
        assert result.finish_reason == ("eos" if tokens[-1] in runtime.info.eos_token_ids else "length")
        stats = result.stats
        early = runtime.info.num_layers - runtime.exit_layer
        assert stats.main_layer_passes == runtime.info.num_layers * len(tokens) - early * stats.hits
        assert stats.hits + stats.misses == len(tokens) - 1
        assert sum(stats.run_lengths) == len(tokens)


def model_with_eos(model_folder, family: str, dtype: str) -> str:
    """A model some of whose texts end early: its end token is one that it is known to write."""
    plain = str(model_folder(family, num_layers=5, dtype=dtype))
    written = expected_tokens(plain, dtype, BY_DAY).values()
    end = next(t for text in written for t in text[3:] if not all(t in other for other in written))
    return str(model_folder(family, num_layers=5, dtype=dtype, eos_token_id=end))


def check_threads(folder: str, dtype: str, lengths: tuple[int, ...], layouts: list[tuple[int, int]]) -> None:
    texts = expected_tokens(folder, dtype, lengths)
    ends = {len(tokens) < NEW_TOKENS for tokens in texts.values()}
    assert ends == {True, False}, "some texts end with the end token, some do not"
    for k, exit_layer in layouts:
        with PPDRuntime(folder, k=k, exit_layer=exit_layer, dtype=dtype, transport="local") as runtime:
            check(runtime, texts)


@pytest.mark.parametrize(
    ("number", "family", "dtype"), [(i, *pair) for i, pair in enumerate(itertools.product(FAMILIES, DTYPES))]
)
def test_threads(model_folder, family, dtype, number):
    """Each layout with several families, and with both dtypes."""
    check_threads(model_with_eos(model_folder, family, dtype), dtype, BY_DAY, LAYOUTS[number % 6 :][:1])


@nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_threads_in_every_layout(model_folder, family, dtype):
    check_threads(model_with_eos(model_folder, family, dtype), dtype, LENGTHS, LAYOUTS)


@nightly
@pytest.mark.parametrize(
    ("family", "dtype", "k", "exit_layer"),
    [(*pair, *LAYOUTS[number % len(LAYOUTS)]) for number, pair in enumerate(itertools.product(FAMILIES, DTYPES))],
)
def test_ray_and_zeromq(ray_node, model_folder, family, dtype, k, exit_layer):
    folder = model_with_eos(model_folder, family, dtype)
    texts = expected_tokens(folder, dtype, LENGTHS)
    vocab_size = describe(folder).vocab_size
    head = OracleHead(tuple((*prompt, *tokens) for prompt, tokens in texts.items()), 0.7, vocab_size)
    with PPDRuntime(
        folder, k=k, exit_layer=exit_layer, dtype=dtype, exit_head=head, transport="zeromq", launcher="ray"
    ) as runtime:
        check(runtime, texts)
