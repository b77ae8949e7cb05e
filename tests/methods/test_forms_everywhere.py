"""Texts that have to look like something: in every layout and method those of ordinary decoding, and valid."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from grids import nightly
from random_schemas import whole_schema
from seeds import SEED
from transformers import AutoModelForCausalLM, LogitsProcessorList
from ways import WAYS

from ppd_runtime import OrdinaryDecoding, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.token_trie import constraint_of
from ppd_runtime.sampling.params import SamplingParams

PROMPT = [5, 9, 200, 31]
SCHEMA = {
    "type": "object",
    "properties": {"the fox": {"enum": ["jumps", "waits"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["the fox", "n"],
    "additionalProperties": False,
}
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_p": 0.9})


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> str:
    return str(model_folder("llama", num_layers=4, quiet_from=2))


@pytest.fixture(scope="module")
def ordinary(folder: str) -> Iterator[OrdinaryDecoding]:
    with OrdinaryDecoding(folder, dtype="float32") as found:
        yield found


@pytest.mark.parametrize("way", [name for name in WAYS if name != "ordinary"])
def test_every_way_gives_ordinary_decodings_text(folder: str, ordinary: OrdinaryDecoding, way: str) -> None:
    with open_method(folder, dtype="float32", **WAYS[way]) as method:
        for settings in SETTINGS:
            asked = {"max_new_tokens": 40, "schema": SCHEMA, **settings}
            expected, found = ordinary.generate(PROMPT, **asked), method.generate(PROMPT, **asked)
            if way == "rejection sampling" and settings:
                assert found.finish_reason == "length" or jsonschema.validate(json.loads(found.text), SCHEMA) is None
            else:
                assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)


def test_greedy_tokens_are_transformers_generate_with_the_masks(folder: str, ordinary: OrdinaryDecoding) -> None:
    """The masks are made anew for each text, from its beginning on."""
    info = describe(folder)
    end = ordinary.tokenizer.eos_token_id
    params = SamplingParams(40, schema=SCHEMA, eos_token_ids=(end,))

    def masked(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        found = constraint_of(info, params, len(PROMPT))
        assert found is not None
        allowed = torch.from_numpy(found.allowed(found.place(input_ids[0].tolist())))
        return scores.masked_fill(~allowed, -torch.inf)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    given = LogitsProcessorList([masked])
    told = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=end, logits_processor=given)
    assert ordinary.generate(PROMPT, params).token_ids == tuple(told[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module", params=["one stage", "running ahead", "stages of rows"])
def way(folder: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    with open_method(folder, dtype="float32", **WAYS[request.param]) as found:
        yield found


@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=nightly)])
def test_texts_of_random_schemas_are_valid_and_ordinary_decodings(
    ordinary: OrdinaryDecoding, way: Any, number: int
) -> None:
    rng, whole = random.Random(SEED), 0
    for seed in range(number):
        schema = whole_schema(SEED + seed)
        settings = ({}, {"temperature": 1.0, "seed": rng.randrange(2**32)})[seed % 2]
        asked = {"max_new_tokens": 150, "schema": schema, "repetition_penalty": 1.1, **settings}
        expected, found = ordinary.generate(PROMPT, **asked), way.generate(PROMPT, **asked)
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason), schema
        if found.finish_reason == "eos":
            jsonschema.validate(json.loads(found.text), schema)
            whole += 1
    assert whole > number * 0.6
