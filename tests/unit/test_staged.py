"""The staged layout's machines over real stages: every token is ordinary decoding's, whatever the order of messages."""

import pytest
from pipeline_runs import PROMPTS, Bench

from ppd_runtime.config import SamplingParams

FAMILIES = ["llama", "gemma2", "mistral"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("cuts", "k", "rows"), [((2,), 1, 1), ((1, 2, 3), 3, 4), ((1, 3), 2, 8)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_bits_are_ordinary_decodings(model_folder, family, cuts, k, rows, temperature, dtype):
    bench = Bench.of(model_folder(family), dtype)
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    for number, text in enumerate(PROMPTS[:4]):
        prompt = bench.prompt_ids(text)
        ordinary = bench.ordinary(prompt, params)
        staged = bench.staged(prompt, params, cuts, k, rows, seed=number or None, impatience=0.003 * (number % 2))
        assert staged.tokens == ordinary.tokens
        assert staged.reason == ordinary.reason
        assert all(a.equal(b) for a, b in zip(staged.decisive, ordinary.decisive, strict=True))
