"""Texts longer than a model was trained for first, as its scaled rotary embedding and its card allow them."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families.attack import prompts
from families.specimens import Specimen
from models_for_tests import build_tokenizer
from transformers import AutoModelForCausalLM

from ppd_runtime import OrdinaryDecoding, PPDRuntime, open_method
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.stage.rotary import RotaryTable

ORIGINAL, FACTOR, NEW_TOKENS = 64, 4, 12
SAMPLED = {"temperature": 0.9, "seed": 5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 6, "max_position_embeddings": 131072}
OLMO = {"model_type": "olmo3", "num_hidden_layers": 4, "max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def spelt(kind: str, factor: float, positions: int, **others: object) -> dict[str, Any]:
    return {"max_position_embeddings": positions, "rope_scaling": {"type": kind, "factor": factor, **others}}


def new_yarn(original: int) -> dict[str, object]:
    return {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": original}


CARDS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5's card": ({"model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
    "the new key": ({"max_position_embeddings": 32768, "rope_scaling": {**YARN, "rope_type": "yarn"}}, 131072),
    "the new spelling": (
        {"max_position_embeddings": 32768, "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1e6}},
        131072,
    ),
    "Qwen3's card": ({"model_type": "qwen3", "max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
    "yarn without the original": (spelt("yarn", 4.0, 32768), 131072),
    "an original beside it": (spelt("yarn", 4.0, 32768) | {"original_max_position_embeddings": 16384}, 65536),
    "yarn, extended already": (spelt("yarn", 40.0, 163840, original_max_position_embeddings=4096), 163840),
    "yarn, longer already": (spelt("yarn", 2.0, 163840, original_max_position_embeddings=4096), 163840),
    "Vicuna 16k": (spelt("linear", 4.0, 4096), 16384),
    "linear, extended already": (spelt("linear", 4.0, 16384, original_max_position_embeddings=4096), 16384),
    "InternLM2": (spelt("dynamic", 2.0, 32768), 65536),
    "dynamic, by no factor": (spelt("dynamic", 1.0, 32768, alpha=1000), 32768),
    "half a position": (spelt("linear", 1.5, 1001), 1501),
    "Llama 3.2": ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
    "Phi-3": (
        {
            "model_type": "phi3",
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": LONG,
        },
        131072,
    ),
    "Gemma 3": (GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
    "Gemma 3, the new spelling": (
        GEMMA
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        131072,
    ),
    "Olmo 3": (OLMO | {"max_position_embeddings": 65536, "rope_scaling": new_yarn(8192)}, 65536),
    "Olmo 3, the original length": (OLMO | {"rope_scaling": new_yarn(8192)}, 65536),
    "one kind of layer": (
        GEMMA
        | {
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "full_attention": new_yarn(8192),
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        65536,
    ),
    "two kinds of layers": (
        GEMMA
        | {
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "full_attention": new_yarn(8192),
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
        },
        16384,
    ),
    "none": ({"max_position_embeddings": 2048}, 2048),
}
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("card", CARDS)
def test_positions_are_those_of_the_models_card(tmp_path: Path, card: str) -> None:
    config, expected = CARDS[card]
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | config))
    assert describe(str(tmp_path), needs_weights=False).max_positions == expected


@pytest.mark.parametrize("factor", ["4", None, float("inf"), -2])
def test_a_factor_that_is_none_extends_nothing(tmp_path: Path, factor: object) -> None:
    config = SHAPE | {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": factor}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        assert describe(str(tmp_path), needs_weights=False).max_positions == 64
    except ValueError as error:
        assert "config.json" in str(error), "the library computes with it"


@pytest.fixture(params=["yarn", "dynamic", "linear"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model with the old spelling in its file, whose `max_position_embeddings` are the original ones."""
    original = {"original_max_position_embeddings": ORIGINAL} if request.param == "yarn" else {}
    specimen = Specimen("llama", "scaled", spelt(request.param, FACTOR, ORIGINAL, **original))
    specimen.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10_000.0, "rope_scaling": specimen.settings["rope_scaling"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    build_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


LENGTHS = [ORIGINAL - 5, ORIGINAL + 1, 3 * ORIGINAL, FACTOR * ORIGINAL - NEW_TOKENS]


def by_the_library(folder: str, prompt: list[int]) -> tuple[int, ...]:
    """Of a model that has seen no other text: a dynamic embedding remembers the longest."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
    return tuple(text[0, len(prompt) :].tolist())


def tokens_of(generator: Any, prompt: list[int], sampling: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    asked = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **(sampling or {})}
    return generator.generate(prompt, **asked).token_ids


def test_long_texts_are_the_librarys(folder: str) -> None:
    """In any order: what a longer text left behind changes no shorter one."""
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    asked = [(prompt, by_the_library(folder, prompt)) for prompt in prompts(LENGTHS)]
    for prompt, expected in (*asked, *asked[::-1]):
        assert tokens_of(ordinary, prompt) == expected, len(prompt)
    (longer,) = prompts([FACTOR * ORIGINAL - NEW_TOKENS + 1])
    with pytest.raises(ValueError, match="make 257, more than the model's 256 positions: shorten the prompt"):
        tokens_of(ordinary, longer)


@pytest.mark.parametrize(
    ("folder", "layout"),
    [
        ("dynamic", {"k": 1}),
        ("linear", {"k": 2, "workers": 1}),
        *((kind, {"stages": 2, "k": 2, "rows": 3}) for kind in ("yarn", "dynamic")),
    ],
    indirect=["folder"],
    ids=str,
)
def test_layouts_run_long_texts(folder: str, layout: dict[str, int]) -> None:
    """In stages several at once."""
    ordinary = OrdinaryDecoding(folder, dtype="float32")
    asked = list(zip(prompts(LENGTHS[:3]), ({}, SAMPLED, {}), strict=True))
    expected = [tokens_of(ordinary, *one) for one in asked]
    with PPDRuntime(folder, transport="local", dtype="float32", **layout) as runtime, ThreadPoolExecutor(3) as callers:
        assert list(callers.map(lambda one: tokens_of(runtime, *one), asked)) == expected


@pytest.mark.parametrize(
    ("folder", "method"), [("yarn", "layerskip"), ("linear", "adaspeed"), ("dynamic", "swift")], indirect=["folder"]
)
def test_methods_run_long_texts(folder: str, method: str) -> None:
    settings: dict[str, Any] = {"swift": {"bayes_interval": 0}, "layerskip": {"exit_layer": 2}}.get(method, {})
    ordinary, other = (
        OrdinaryDecoding(folder, dtype="float32"),
        open_method(folder, method, dtype="float32", **settings),
    )
    for prompt in prompts(LENGTHS[:2]):
        assert tokens_of(other, prompt, SAMPLED) == tokens_of(ordinary, prompt, SAMPLED)


@pytest.mark.parametrize("folder", ["dynamic"], indirect=True)
def test_a_dynamic_embedding_remembers_nothing(folder: str) -> None:
    """Each position beyond the original ones has the table of its own length, whichever were asked for before."""
    make: Callable[[], Any] = lambda: AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb  # noqa: E731
    table, states = RotaryTable(make(), FACTOR * ORIGINAL), torch.zeros(1, 1, 32)
    assert (table.changes_from, table.borders, table.knows_borders) == (ORIGINAL, (), True)
    assert [table.most_together(at) for at in (0, ORIGINAL - 2, ORIGINAL - 1, ORIGINAL, 200)] == [ORIGINAL, 2, 1, 1, 1]
    for places in ([200], [5], [ORIGINAL], [ORIGINAL - 1], [100], [99], [3, 4], [70, 71, 72]):
        position_ids = torch.tensor([places])
        for ours, theirs in zip(table(states, position_ids), make()(states, position_ids), strict=True):
            assert torch.equal(ours, theirs), places
