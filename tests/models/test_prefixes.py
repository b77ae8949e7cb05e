"""Prompts that begin alike: stages take over the chunks that they keep, and each bit is what they would compute."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from grids import nightly
from models_for_tests import FAMILIES

from ppd_runtime import GenerationResult, OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.stage import chunks
from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.chunks import prompt_chunks
from ppd_runtime.models.stage.prefixes import KeptChunk, KeptPrefixes
from ppd_runtime.runtime import PPDRuntime as Runtime
from ppd_runtime.settings.config import RuntimeConfig

CHUNK = 8
TEXT = [7 * i % 290 + 1 for i in range(40)]
SAMPLED = {"max_new_tokens": 6, "temperature": 0.9, "seed": 4, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ONE_PASS", CHUNK)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (CHUNK, CHUNK))


def of(result: GenerationResult) -> object:
    return result.token_ids, result.logprobs


def staged(folder: Path, **settings: object) -> Runtime:
    return PPDRuntime(str(folder), **{"stages": 3, "transport": "local", "dtype": "float32", **settings})


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("gemma3_text", "bfloat16"),
        *(pytest.param(family, dtype, marks=nightly) for family in FAMILIES for dtype in ("float32", "bfloat16")),
    ],
)
def test_a_text_is_its_own_whatever_was_kept(model_folder: Callable[..., Path], family: str, dtype: str) -> None:
    folder = model_folder(family, num_layers=4)
    ordinary = OrdinaryDecoding(str(folder), dtype=dtype)
    prompts = [TEXT[:37], TEXT[:37], [*TEXT[:18], 3, 4], TEXT[:24], [5, *TEXT[1:20]], TEXT[:8], TEXT[:7]]
    with staged(folder, dtype=dtype) as runtime:
        got = [runtime.generate(prompt, **SAMPLED) for prompt in prompts]
    assert [of(result) for result in got] == [of(ordinary.generate(prompt, **SAMPLED)) for prompt in prompts]
    assert [result.stats.cached_tokens for result in got] == [0, 32, 16, 24, 0, 8, 0]


def test_so_many_tokens_are_kept(model_folder: Callable[..., Path]) -> None:
    """The chunks that were used last."""
    folder, other = model_folder("llama", num_layers=4), [9, *TEXT[1:17]]
    with staged(folder, prefix_cache_tokens=3 * CHUNK) as runtime:
        cached = [
            runtime.generate(prompt, max_new_tokens=2).stats.cached_tokens
            for prompt in (TEXT[:17], TEXT[:11], other, TEXT[:17], TEXT[:17])
        ]
    assert cached == [0, 8, 0, 8, 16]
    with staged(folder, prefix_cache_tokens=CHUNK - 1) as runtime:
        assert [runtime.generate(TEXT, max_new_tokens=2).stats.cached_tokens for _ in range(2)] == [0, 0]


def test_chunks_of_two_sizes_are_counted_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ONE_PASS", 8)
    monkeypatch.setattr(chunks, "PROMPT_CHUNKS", (8, 4))
    kept, parts = KeptPrefixes(16), prompt_chunks(21)
    keys = [kept.key(TEXT, part) for part in parts]
    assert [key is not None for key in keys] == [True, True, True, True, False]
    for key, part in [(keys[0], parts[0]), *zip(keys[:4], parts, strict=False)]:
        kept.keep(key, KeptChunk(StageCache([], 0), part, torch.empty(0)))
    assert [kept.find(key) is not None for key in keys[:4]] == [False, True, True, True]


def test_a_request_takes_over_from_one_that_is_under_way(model_folder: Callable[..., Path]) -> None:
    """Entries that still lie in the other's rows, which go on being used."""
    folder, long = model_folder("llama", num_layers=4), {**SAMPLED, "max_new_tokens": 40}
    ordinary = OrdinaryDecoding(str(folder), dtype="float32")
    prompts = [TEXT[:37], [*TEXT[:18], 3, 4], TEXT[:24]]
    with staged(folder, max_requests=3) as runtime, ThreadPoolExecutor(3) as callers:
        first = runtime.stream(prompts[0], **long)
        next(first)  # so its chunks have run, and most of its tokens have not
        got = list(callers.map(lambda prompt: runtime.generate(prompt, **long), prompts[1:]))
        last = [*first, first.result][-1]
    expected = [of(ordinary.generate(prompt, **long)) for prompt in prompts]
    assert [of(result) for result in (last, *got)] == expected
    assert [result.stats.cached_tokens for result in (last, *got)] == [0, 16, 24]


def test_a_bad_number_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache_tokens=-1: must be at least 0"):
        RuntimeConfig(stages=2, prefix_cache_tokens=-1)
    with pytest.raises(ValueError, match="prefix_cache_tokens"):
        RuntimeConfig(k=2, prefix_cache_tokens=512)
